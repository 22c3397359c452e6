"""The Trainer callbacks that harden and that log λ.

What HardeningCallback does follows from the trainer's position and the model alone, so a run that is resumed from any
checkpoint goes on as if it had never stopped.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length
from transformers.utils import logging

from hf_lgelu.models.hardening import (
    HARDENED_FRACTION,
    Target,
    anneal_hardness,
    freeze_hardness,
    hardness_profile,
    is_hardened,
    release_hardness,
    smallest_soft_hardness,
    target_hardnesses,
)
from hf_lgelu.models.operable import require_unflattened
from hf_lgelu.models.schedules import DEFAULT_SWITCH_FRACTION, check_schedule, hardening_progress, switch_position
from hf_lgelu.models.sites import lambda_gelu_modules, require_lambda_gelu
from hf_lgelu.training.optim import check_hardness_learns, hardness_learning_rate, hold_averaged_hardness
from hf_lgelu.training.refusals import (
    largest_override,
    refuse_best_checkpoints,
    refuse_deepspeed,
    require_gradient,
    tell_released,
    tell_softer,
    tell_ungrouped,
    tell_unreached,
)

logger = logging.get_logger(__name__)

STRATEGIES = ("epoch", "steps")
"""How often λ moves while it hardens, in the words of TrainingArguments."""


class HardeningCallback(TrainerCallback):
    """Algorithm 1 of the paper: learn λ, then freeze s and move every λ to a target while the weights train on.

    With T epochs and e_s = ⌊switch_fraction·T⌋, epoch e > e_s trains and is evaluated with
    λ(e) = λ(e_s) + (e − e_s)/(T − e_s)·(target − λ(e_s)), so the whole last epoch has the target.

    Args:
        target_hardness: λ at the end: one for all, or as for `anneal_hardness` one by name (`layer_targets`).
        tolerance: ε, with each gate's `hardness_for_tolerance(ε, gate)`, 2/(ε√(2π)) for λ-GELU; 5e-3 if neither is
            given.
        switch_fraction: share of training in which λ is learned, in [0, 1).
        schedule: a row of SCHEDULES; "linear" is the paper's.
        strategy: "epoch" (the paper's), or "steps": the same with optimizer steps for epochs.

    Use it with `LambdaGELUTrainer`, which gives s its learning rate and selects best checkpoints among hardened epochs
    only. In a plain Trainer it works as well, with an optimizer of `hardness_parameter_groups` (without one s learns as
    slowly as the weights and decays with them, which is warned of), except together with `load_best_model_at_end` or
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
    >>> groups = hf_lgelu.hardness_parameter_groups(model, learning_rate=1e-3)
    >>> optimizers = torch.optim.AdamW(groups), None  # Trainer makes the scheduler
    >>> trainer = Trainer(model, args, train_dataset=rows, callbacks=[callback], optimizers=optimizers)
    >>> _ = trainer.train()  # doctest: +ELLIPSIS
    {...}
    >>> [round(value, 3) for value in hf_lgelu.hardness_profile(model).values()]
    [79.788, 79.788]
    """

    selects_hardened_checkpoints = False
    """LambdaGELUTrainer sets it while it trains."""

    def __init__(
        self,
        target_hardness: float | Mapping[str, Target] | None = None,
        tolerance: float | None = None,
        switch_fraction: float = DEFAULT_SWITCH_FRACTION,
        schedule: str = "linear",
        strategy: str = "epoch",
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r} of hardening; accepted: {', '.join(STRATEGIES)}")
        switch_position(1, switch_fraction)  # raises on a fraction out of range
        self.targets = target_hardnesses(target_hardness, tolerance)
        self.switch_fraction = switch_fraction
        self.schedule = check_schedule(schedule).name
        self.strategy = strategy
        self._epochs = _EpochCount()
        self._has_learned = False  # that gradients reach s was seen
        self._resumed_hardness = 0.0  # until it is compared with what the run goes on with

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        self._epochs.forget()
        self._has_learned = False
        refuse_deepspeed(args)
        check_hardness_learns(model, optimizer)
        if state.global_step == 0:
            tell_released(model, self.switch_fraction)
        self._resumed_hardness = largest_override(model) if state.global_step else 0.0
        by_step = self.strategy == "steps"
        if not by_step and state.num_train_epochs >= sys.maxsize:
            raise ValueError(
                "the training data has no length, so epochs cannot be counted; harden with strategy='steps'"
            )
        if not self.selects_hardened_checkpoints:
            refuse_best_checkpoints(args)
            if self.switch_fraction > 0:
                tell_ungrouped(optimizer, model)
        elif state.best_metric is not None and not is_hardened(model, self.targets):
            _forget_best(state)
        total, unit = (state.max_steps, "steps") if by_step else (state.num_train_epochs, "epochs")
        if self.switch_fraction > 0 and switch_position(total, self.switch_fraction) == 0:
            logger.warning(
                f"With {total} {unit}, ⌊{self.switch_fraction}·{total}⌋ = 0: hardening begins at once and "
                "λ is never learned. Train longer, or harden with strategy='steps' (hardening_strategy='steps')"
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
        self._epochs.begin(args, state, kwargs.get("train_dataloader"))
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
        elif not self._has_learned:
            require_gradient(model)
            self._has_learned = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        self._epochs.forget()
        if lambda_gelu_modules(model) and not is_hardened(model, self.targets):
            soft = smallest_soft_hardness(model, self.targets)
            logger.warning(
                f"Training has ended and the gates are still soft (down to λ = {soft:.4g}, less than "
                f"{HARDENED_FRACTION:.0%} of its target): ReLU in their place would be another network. Was it "
                "stopped early, or resumed with another number of steps in an epoch? Train on to the last epoch, or "
                "keep the λ-gates"
            )

    def progress(self, state: TrainerState) -> float | None:
        """How far hardening has come at the trainer's position, in [0, 1]; None while λ is learned."""
        if self.strategy == "epoch":
            position, total = self._epochs.number(state), int(state.num_train_epochs)
        else:
            position, total = min(state.global_step + 1, state.max_steps), state.max_steps
        return hardening_progress(position, total, self.switch_fraction)

    def _set_hardness(self, model: nn.Module, optimizer: Any, state: TrainerState) -> None:
        progress = self.progress(state)
        if progress is None:
            release_hardness(model)
        else:
            hold_averaged_hardness(optimizer, model)
            anneal_hardness(model, progress, target_hardness=self.targets, schedule=self.schedule)
        if self._resumed_hardness >= 1:
            tell_softer(self._resumed_hardness, largest_override(model))
        self._resumed_hardness = 0.0


class _EpochCount:
    """The number of the epoch that a trainer is in, or is about to begin: from 1 to T.

    Counted, since `state.epoch` is a share of the steps that an epoch was to have. One that ends early (a loader with
    fewer batches than its length says, `control.should_epoch_stop`) leaves a fraction there, and the next epoch would
    pass for the same. A run that is resumed with fewer steps in an epoch goes on further along, as Trainer counts.
    """

    def __init__(self) -> None:
        self._begun: int | None = None

    def forget(self) -> None:
        """Before a training and after it: the state says where it is."""
        self._begun = None

    def begin(self, args: TrainingArguments, state: TrainerState, train_dataloader: Any = None) -> None:
        """An epoch begins; the first may be one that a resumed run goes on with."""
        if self._begun is not None:
            self._begun = max(self._begun + 1, _epoch_in(state))
            return
        self._begun = _epoch_in(state)
        if has_length(train_dataloader):
            steps = -(-len(train_dataloader) // args.gradient_accumulation_steps)
            self._begun = max(self._begun, state.global_step // max(steps, 1) + 1)

    def number(self, state: TrainerState) -> int:
        """The epoch's, from 1 on."""
        return min(_epoch_in(state) if self._begun is None else self._begun, int(state.num_train_epochs))


def _epoch_in(state: TrainerState) -> int:
    return int(state.epoch or 0) + 1  # in the middle of an epoch, as after a resume, it has a fraction


def _forget_best(state: TrainerState) -> None:
    """Let no checkpoint count as the best so far: the run that wrote it did not harden."""
    step = "" if state.best_global_step is None else f", of step {state.best_global_step}"
    logger.warning(
        f"The best checkpoint so far{step}, counts no longer: its gates were soft, and hardening looks for the best "
        "among hardened ones"
    )
    state.best_metric = state.best_global_step = state.best_model_checkpoint = None


class HardnessLogCallback(TrainerCallback):
    """Adds to every training log: each site's λ, their mean, and the learning rate of s.

    Evaluations get the same in the trainer's `state.log_history`. Keys: `hardness/<module name>`,
    `hardness/mean`, `hardness_learning_rate`. A warning names the gates
    that the first step has no gradient for. LambdaGELUTrainer has it by default. It must run before
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
        self._has_looked = False  # for gates that no gradient reaches

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
        if not lambda_gelu_modules(model) and not getattr(args, "require_lambda_gelu", True):
            return  # ReLU has been substituted since the trainer was made, and is trained on
        require_unflattened(require_lambda_gelu(model))
        self._has_looked = False
        if not self._runs_first:
            raise RuntimeError(
                "this HardnessLogCallback runs after the reporters, which would never see what it adds. Do not pass it "
                "in callbacks=[...] of a plain Trainer; call HardnessLogCallback.add_to(trainer), or use "
                "LambdaGELUTrainer"
            )

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        if not self._has_looked:  # in front of the callback that takes gradients away
            tell_unreached(model)
        self._has_looked = True

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


def without_hardness(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A trainer's log without what this callback adds to its entries."""
    return [{name: value for name, value in entry.items() if not name.startswith("hardness")} for entry in log_history]
