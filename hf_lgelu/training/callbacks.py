"""Trainer callbacks: hardening, and the hardness of every layer in the log.

What they do follows from the trainer's position and the model, so a run resumed from any checkpoint goes on
as if it had never stopped.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from hf_lgelu.models.optimizer_groups import check_rate
from hf_lgelu.models.profile import hardness_profile
from hf_lgelu.models.sites import lambda_gelu_modules, require_lambda_gelu
from hf_lgelu.training.hardening import (
    HARDENED_FRACTION,
    anneal_hardness,
    freeze_hardness,
    release_hardness,
    target_hardnesses,
)
from hf_lgelu.training.optim import check_hardness_learns, hardness_learning_rate, hold_averaged_hardness
from hf_lgelu.training.schedules import (
    DEFAULT_PLATEAU_TOLERANCE,
    DEFAULT_SWITCH_FRACTION,
    check_schedule,
    hardening_progress,
    settled_epoch,
    switch_position,
)

logger = logging.get_logger(__name__)

STRATEGIES = ("epoch", "steps")
"""How often λ moves while it hardens, in the words of TrainingArguments."""

SWITCHES = ("fixed", "plateau")
"""When λ is learned no longer and hardens."""

_NOTED = "hardening/mean_hardness"  # of an entry of state.log_history: the mean λ with which an epoch begins


class HardeningCallback(TrainerCallback):
    """Algorithm 1 of the paper: learn λ, then freeze s and move every λ to a target while the weights train on.

    With T epochs and e_s = ⌊switch_fraction·T⌋, epoch e > e_s trains and is evaluated with
    λ(e) = λ(e_s) + (e − e_s)/(T − e_s)·(target − λ(e_s)), so the whole last epoch has the target.

    Args:
        target_hardness: λ at the end: one for all, or as for `anneal_hardness` one by name (`layer_targets`). Or
        tolerance: ε, with each gate's `hardness_for_tolerance(ε, gate)`, 2/(ε√(2π)) for λ-GELU; 5e-3 if neither is
            given.
        switch_fraction: share of training in which λ is learned, in [0, 1).
        schedule: a row of SCHEDULES; "linear" is the paper's.
        strategy: "epoch" (the paper's), or "steps": the same with optimizer steps for epochs.
        switch: "fixed" (the paper's), or "plateau": hardening begins after the first epoch in which, as in the one
            before it, the mean λ has moved by at most `plateau_tolerance` of itself, and after ⌊switch_fraction·T⌋
            epochs at the latest. The means stand in the trainer's `state.log_history`, so that a resumed run decides
            as the uninterrupted one does.
        plateau_tolerance: relative, per epoch; at least 0.

    Use it with `LambdaGELUTrainer`, which selects best checkpoints among hardened epochs only. In a
    plain Trainer it works as well, except together with `load_best_model_at_end` or
    `save_strategy="best"`, which raise; DeepSpeed is refused. An s that is frozen or that the optimizer does not hold
    raises when training begins.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> rows = [{"features": torch.randn(4), "labels": i % 2} for i in range(8)]
    >>> from transformers import Trainer, TrainingArguments
    >>> args = TrainingArguments(
    ...     output_dir="run", num_train_epochs=4, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    ... )
    >>> callback = hf_lgelu.HardeningCallback(tolerance=0.01, schedule="geometric", strategy="steps")
    >>> trainer = Trainer(model, args, train_dataset=rows, callbacks=[callback])
    >>> _ = trainer.train()  # doctest: +ELLIPSIS
    {...}
    >>> [round(value, 3) for value in hf_lgelu.hardness_profile(model).values()]
    [79.788, 79.788]
    """

    selects_hardened_checkpoints = False
    """LambdaGELUTrainer sets it while it trains."""

    def __init__(
        self,
        target_hardness: float | Mapping[str, float] | None = None,
        tolerance: float | None = None,
        switch_fraction: float = DEFAULT_SWITCH_FRACTION,
        schedule: str = "linear",
        strategy: str = "epoch",
        switch: str = "fixed",
        plateau_tolerance: float = DEFAULT_PLATEAU_TOLERANCE,
    ) -> None:
        for what, given, accepted in (("strategy", strategy, STRATEGIES), ("switch", switch, SWITCHES)):
            if given not in accepted:
                raise ValueError(f"unknown {what} {given!r} of hardening; accepted: {', '.join(accepted)}")
        check_rate("plateau_tolerance", plateau_tolerance)
        switch_position(1, switch_fraction)  # raises on a fraction out of range
        self.targets = target_hardnesses(target_hardness, tolerance)
        self.switch_fraction = switch_fraction
        self.schedule = check_schedule(schedule).name
        self.strategy = strategy
        self.switch = switch
        self.plateau_tolerance = plateau_tolerance

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        _refuse_deepspeed(args)
        check_hardness_learns(model, optimizer)
        if self.strategy == "epoch" and state.num_train_epochs >= sys.maxsize:
            raise ValueError(
                "the training data has no length, so epochs cannot be counted; harden with strategy='steps'"
            )
        if self.switch == "plateau" and state.num_train_epochs >= sys.maxsize:
            raise ValueError(
                "the training data has no length, and a plateau is looked for from epoch to epoch; harden with "
                "switch='fixed'"
            )
        if not self.selects_hardened_checkpoints:
            _refuse_best_checkpoints(args)
        total = state.max_steps if self.strategy == "steps" else state.num_train_epochs
        if self.switch_fraction > 0 and switch_position(total, self.switch_fraction) == 0:
            unit = "epochs" if self.strategy == "epoch" else "steps"
            logger.warning(
                f"With {total} {unit}, ⌊{self.switch_fraction}·{total}⌋ = 0: hardening begins at once and "
                "λ is never learned. Train longer, or harden with strategy='steps'"
            )

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: Any,
        **kwargs: Any,
    ) -> None:
        if self.switch == "plateau":
            self._note_hardness(model, state)
        if self.strategy == "epoch":
            self._set_hardness(model, optimizer, state)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: Any,
        **kwargs: Any,
    ) -> None:
        if self.strategy == "steps":
            self._set_hardness(model, optimizer, state)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        if self.progress(state) is not None:
            freeze_hardness(model)

    def progress(self, state: TrainerState) -> float | None:
        """How far hardening has come at the trainer's position, in [0, 1]; None while λ is learned."""
        if self.strategy == "epoch":
            position, total = _epoch_position(state), int(state.num_train_epochs)
        else:
            position, total = min(state.global_step + 1, state.max_steps), state.max_steps
        if self.switch == "fixed":
            return hardening_progress(position, total, self.switch_fraction)
        switch = self._settled(state)
        return None if switch is None or position <= switch else (position - switch) / (total - switch)

    def _note_hardness(self, model: nn.Module, state: TrainerState) -> None:
        """Keep the mean λ with which an epoch begins where checkpoints keep it, each epoch's once."""
        epoch = _epoch_position(state)
        if len(_noted(state)) < epoch:  # a run resumed in the middle of an epoch begins it twice
            profile = hardness_profile(model)
            mean = sum(profile.values()) / len(profile)
            state.log_history.append({_NOTED: mean, "epoch": epoch - 1.0, "step": state.global_step})

    def _settled(self, state: TrainerState) -> int | None:
        """The last epoch (or step) in which λ is learned; None if it is not known yet."""
        notes = _noted(state)
        epochs = int(state.num_train_epochs)
        latest = switch_position(epochs, self.switch_fraction)
        found = settled_epoch([note[_NOTED] for note in notes], self.plateau_tolerance)
        epoch = latest if found is None or found > latest else found
        if epoch >= len(notes):  # it has not ended
            return None
        return epoch if self.strategy == "epoch" else int(notes[epoch]["step"])

    def _set_hardness(self, model: nn.Module, optimizer: Any, state: TrainerState) -> None:
        progress = self.progress(state)
        if progress is None:
            release_hardness(model)
        else:
            hold_averaged_hardness(optimizer, model)
            anneal_hardness(model, progress, target_hardness=self.targets, schedule=self.schedule)


def epoch_progress(state: TrainerState, switch_fraction: float) -> float | None:
    """`hardening_progress` of the epoch that the trainer is in, or is about to begin."""
    return hardening_progress(_epoch_position(state), int(state.num_train_epochs), switch_fraction)


def _epoch_position(state: TrainerState) -> int:
    # In the middle of an epoch, as after a resume, state.epoch has a fraction.
    return min(int(state.epoch or 0) + 1, int(state.num_train_epochs))


def _noted(state: TrainerState) -> list[dict[str, float]]:
    return [entry for entry in state.log_history if _NOTED in entry]


def _refuse_deepspeed(args: TrainingArguments) -> None:
    if args.distributed_state is not None and args.distributed_state.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "hardening does not work with DeepSpeed: its engine makes the optimizer step inside backward, before s can "
            "be frozen, and momentum would move s. Use FSDP2 or DistributedDataParallel"
        )


def _refuse_best_checkpoints(args: TrainingArguments) -> None:
    for option, selects in (
        ("load_best_model_at_end", args.load_best_model_at_end),
        ("save_strategy='best'", args.save_strategy == "best"),
    ):
        if selects:
            raise ValueError(
                f"{option} would select an epoch whose gates are still soft, and substituting ReLU there destroys the "
                "model. Use LambdaGELUTrainer, which selects among hardened epochs only (λ from "
                f"{HARDENED_FRACTION:.0%} of the target on), or turn it off"
            )


class HardnessLogCallback(TrainerCallback):
    """Adds to every training log: each site's λ, their mean, and the learning rate of s.

    Evaluations get the same in the trainer's `state.log_history`. Keys: `hardness/<module name>`,
    `hardness/mean`, `hardness_learning_rate`. LambdaGELUTrainer has it by default. It must run before
    the reporters (tensorboard, trackio, wandb), and callbacks that are passed to a plain Trainer run
    after them: add it there with `HardnessLogCallback.add_to(trainer)`.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> rows = [{"features": torch.randn(4), "labels": i % 2} for i in range(8)]
    >>> from transformers import Trainer, TrainingArguments
    >>> args = TrainingArguments(
    ...     output_dir="run", max_steps=1, logging_steps=1, use_cpu=True, report_to=[], save_strategy="no",
    ...     disable_tqdm=True,
    ... )
    >>> trainer = Trainer(model, args, train_dataset=rows)
    >>> _ = hf_lgelu.HardnessLogCallback.add_to(trainer)
    >>> _ = trainer.train()  # doctest: +ELLIPSIS
    {...}
    >>> [name for name in trainer.state.log_history[0] if name.startswith("hardness/")]
    ['hardness/layers.0.activation', 'hardness/layers.1.activation', 'hardness/mean']
    """

    def __init__(self) -> None:
        self._learning_rate: float | torch.Tensor | None = None
        self._runs_first = False

    @classmethod
    def add_to(cls, trainer: Trainer) -> "HardnessLogCallback":
        """Put the trainer's HardnessLogCallback, or a new one, in front of its reporters."""
        callback = trainer.pop_callback(cls) or cls()
        trainer.callback_handler.callbacks.insert(0, callback)
        callback._runs_first = True
        return callback

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        require_lambda_gelu(model)
        if not self._runs_first:
            raise RuntimeError(
                "this HardnessLogCallback runs after the reporters, which would never see what it adds. Do not pass it "
                "in callbacks=[...] of a plain Trainer; call HardnessLogCallback.add_to(trainer), or use "
                "LambdaGELUTrainer"
            )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, optimizer: Any, **kwargs: Any
    ) -> None:
        # Trainer logs the learning rate of the step just made, and the scheduler moves on before the log.
        self._learning_rate = hardness_learning_rate(optimizer)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        evaluated = logs is not None and any(name.startswith("eval_") for name in logs)
        if logs is None or not ("loss" in logs or evaluated):
            return
        if not lambda_gelu_modules(model):  # ReLU has been substituted since the trainer was made
            return
        profile = hardness_profile(model)
        added = {f"hardness/{name}": value for name, value in profile.items()}
        added["hardness/mean"] = sum(profile.values()) / len(profile)
        if self._learning_rate is not None:
            added["hardness_learning_rate"] = float(self._learning_rate)
        if state.log_history:
            state.log_history[-1].update(added)
        if not evaluated:  # the reporters have this step's λ from its training log already
            logs.update(added)
