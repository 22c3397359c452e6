"""The Trainer callback that hardens.

What it does follows from the trainer's position, the model, and what it has left in the trainer's log history
(`adaptive`), so a run resumed from any checkpoint goes on as if it had never stopped.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from statistics import fmean
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from hf_lgelu.models.example_run import Inputs
from hf_lgelu.models.optimizer_groups import check_rate
from hf_lgelu.models.profile import hardness_profile, smallest_by_site
from hf_lgelu.models.sites import lambda_gelu_modules
from hf_lgelu.training.adaptive import (
    DEFAULT_RATE_TOLERANCE,
    decided_once,
    largest_move,
    mean_divergence,
    measured_targets,
    noted,
    require_measurable,
)
from hf_lgelu.training.epoch_count import EpochCount, require_epochs
from hf_lgelu.training.hardening import (
    HARDENED_FRACTION,
    Target,
    anneal_hardness,
    freeze_hardness,
    is_hardened,
    release_hardness,
    smallest_soft_hardness,
    target_hardnesses,
)
from hf_lgelu.training.layer_targets import DEFAULT_SWAP_TOLERANCE, MEASURED, check_tolerance
from hf_lgelu.training.optim import check_hardness_learns, hold_averaged_hardness
from hf_lgelu.training.refusals import (
    largest_override,
    refuse_best_checkpoints,
    refuse_deepspeed,
    require_gradient,
    tell_released,
    tell_softer,
    tell_ungrouped,
)
from hf_lgelu.training.resume import forget_best
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

RATES = ("schedule", "tolerance")
"""What says how far λ goes in an epoch."""

_MEAN = "hardening/mean_hardness"  # with which an epoch begins
_TARGETS = "hardening/targets"
_PROGRESS = "hardening/progress"  # of an epoch


class HardeningCallback(TrainerCallback):
    """Algorithm 1 of the paper: learn λ, then freeze s and move every λ to a target while the weights train on.

    With T epochs and e_s = ⌊switch_fraction·T⌋, epoch e > e_s trains and is evaluated with
    λ(e) = λ(e_s) + (e − e_s)/(T − e_s)·(target − λ(e_s)), so the whole last epoch has the target.

    Args:
        target_hardness: λ at the end: one for all, or as for `anneal_hardness` one by name; or "measured", for what
            `layer_targets` measures when s freezes, and where λ is beyond that, λ as it is.
        tolerance: ε, with each gate's `hardness_for_tolerance(ε, gate)`, 2/(ε√(2π)) for λ-GELU; 5e-3 if neither is
            given. With "measured" that of `layer_targets`, 0.01 by default.
        switch_fraction: share of training in which λ is learned, in [0, 1).
        schedule: a row of SCHEDULES; "linear" is the paper's.
        strategy: "epoch" (the paper's), or "steps": the same with optimizer steps for epochs.
        switch: "fixed" (the paper's), or "plateau": hardening begins after the first epoch in which, as in the one
            before it, the mean λ has moved by at most `plateau_tolerance` of itself, and after ⌊switch_fraction·T⌋
            epochs at the latest. The means stand in the trainer's `state.log_history`, so that a resumed run decides
            as the uninterrupted one does.
        plateau_tolerance: relative, per epoch; at least 0. With switch="plateau" alone.
        rate: "schedule" (the paper's), or "tolerance": the progress of an epoch is the largest, between that of the
            epoch before and 1, with which the predictions are at most `rate_tolerance` from those before the move (mean
            KL on `data`, to 1/1024 of the way that is left); in the last epoch it is 1 in any case. Needs
            strategy="epoch". At progress 1 a move ends κ/target from ReLU: where it costs no more, hardening is over.
        rate_tolerance: nats of a prediction; at least 0. With rate="tolerance" alone.
        data: for "measured" and "tolerance", one batch or an iterable of batches, held out of training. Each process
            gets the same; the first decides. LambdaGELUTrainer takes 8 batches of its evaluation data if None.

    What was measured stands in the trainer's `state.log_history` too, with the epoch.

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
        target_hardness: float | Mapping[str, Target] | str | None = None,
        tolerance: float | None = None,
        switch_fraction: float = DEFAULT_SWITCH_FRACTION,
        schedule: str = "linear",
        strategy: str = "epoch",
        switch: str = "fixed",
        plateau_tolerance: float = DEFAULT_PLATEAU_TOLERANCE,
        rate: str = "schedule",
        rate_tolerance: float = DEFAULT_RATE_TOLERANCE,
        data: Inputs | Iterable[Inputs] | None = None,
    ) -> None:
        for what, given, accepted in (
            ("strategy", strategy, STRATEGIES), ("switch", switch, SWITCHES), ("rate", rate, RATES),
        ):  # fmt: skip
            if given not in accepted:
                raise ValueError(f"unknown {what} {given!r} of hardening; accepted: {', '.join(accepted)}")
        check_rate("plateau_tolerance", plateau_tolerance)
        check_rate("rate_tolerance", rate_tolerance)
        if switch != "plateau" and plateau_tolerance != DEFAULT_PLATEAU_TOLERANCE:
            raise ValueError("plateau_tolerance counts with switch='plateau' alone: give that too, or leave it out")
        if rate != "tolerance" and rate_tolerance != DEFAULT_RATE_TOLERANCE:
            raise ValueError("rate_tolerance counts with rate='tolerance' alone: give that too, or leave it out")
        if rate == "tolerance" and strategy == "steps":
            raise ValueError("rate='tolerance' measures once an epoch: harden with strategy='epoch'")
        switch_position(1, switch_fraction)  # raises on a fraction out of range
        self.targets: Mapping[str, Target] | None = None
        if isinstance(target_hardness, str):
            if target_hardness != MEASURED:
                raise ValueError(
                    f"target_hardness must be a number, or one by name, or 'measured', got {target_hardness!r}"
                )
            self.swap_tolerance = check_tolerance(DEFAULT_SWAP_TOLERANCE if tolerance is None else tolerance)
        else:
            self.targets = target_hardnesses(target_hardness, tolerance)
        self._read: tuple[Any, Mapping[str, Target] | None] = (None, None)
        self._epochs = EpochCount()
        self._has_learned = False  # that gradients reach s was seen
        self._resumed_hardness = 0.0  # until it is compared with what the run goes on with
        self.rate = rate
        self.rate_tolerance = rate_tolerance
        self.data: list[Inputs] | None = None
        """What it measures on."""
        if data is not None:
            self.data = [data] if isinstance(data, Tensor | Mapping) else list(data)
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
        self._epochs.forget()
        self._has_learned = False
        refuse_deepspeed(args)
        check_hardness_learns(model, optimizer)
        if state.global_step == 0:
            tell_released(model, self.switch_fraction)
        self._resumed_hardness = largest_override(model) if state.global_step else 0.0
        if self.strategy == "epoch":
            require_epochs(state, "so epochs cannot be counted; harden with strategy='steps'")
        if self.switch == "plateau":
            require_epochs(state, "and a plateau is looked for from epoch to epoch; harden with switch='fixed'")
        if self.needs_data:
            raise ValueError(
                "target_hardness='measured' and rate='tolerance' measure the network on data that it is not trained "
                "on: give HardeningCallback(data=...), or LambdaGELUTrainer an eval_dataset"
            )
        if self.rate == "tolerance" or self.targets is None:
            require_measurable(model, (self.data or [])[0], classes=self.rate == "tolerance")
        if not self.selects_hardened_checkpoints:
            refuse_best_checkpoints(args)
            if self.switch_fraction > 0:
                tell_ungrouped(optimizer, model)
        elif state.best_metric is not None:
            targets = self.targets_at(state)
            if targets is None or not is_hardened(model, targets):
                forget_best(state, "its gates were soft, and hardening looks for the best among hardened ones")
        by_step = self.strategy == "steps" and self.switch == "fixed"  # a plateau is one of epochs
        total, unit = (state.max_steps, "steps") if by_step else (state.num_train_epochs, "epochs")
        if self.switch_fraction > 0 and switch_position(total, self.switch_fraction) == 0:
            logger.warning(
                f"With {total} {unit}, ⌊{self.switch_fraction}·{total}⌋ = 0: hardening begins at once and "
                "λ is never learned. Train longer, or harden with strategy='steps' and switch='fixed' (of the training "
                "arguments hardening_strategy and hardening_switch)"
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
        if self.switch == "plateau":
            decided_once(state, _MEAN, self._epochs.number(state), lambda: fmean(hardness_profile(model).values()))
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
        self._tell_soft(state, model)

    def _tell_soft(self, state: TrainerState, model: nn.Module) -> None:
        """Say it where training has ended before the gates were hard: ReLU in their place would be another network."""
        targets = self.targets_at(state)
        if lambda_gelu_modules(model) and (targets is None or not is_hardened(model, targets)):
            soft = None if targets is None else smallest_soft_hardness(model, targets)
            hardness = min(smallest_by_site(model).values()) if soft is None else soft
            logger.warning(
                f"Training has ended and the gates are still soft (down to λ = {hardness:.4g}, less than "
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
        if self.switch == "fixed":
            return hardening_progress(position, total, self.switch_fraction)
        switch = self._settled(state)
        return None if switch is None or position <= switch else (position - switch) / (total - switch)

    def targets_at(self, state: TrainerState) -> Mapping[str, Target] | None:
        """The target of each gate, by its name or its row of GATES; None if it has not been measured yet."""
        found = noted(state, _TARGETS) if self.targets is None else []
        if found and self._read[0] is not found[-1]:  # each step asks
            self._read = found[-1], target_hardnesses(found[-1][_TARGETS])
        return self._read[1] if found else self.targets

    @property
    def needs_data(self) -> bool:
        """Whether it measures on data that nobody has given it yet."""
        return not self.data and (self.targets is None or self.rate == "tolerance")

    def _settled(self, state: TrainerState) -> int | None:
        """The last epoch (or step) in which λ is learned; None if it is not known yet."""
        notes = noted(state, _MEAN)
        epochs = int(state.num_train_epochs)
        latest = switch_position(epochs, self.switch_fraction)
        found = settled_epoch([note[_MEAN] for note in notes], self.plateau_tolerance)
        settled = None if found is None else int(notes[found]["epoch"])  # of a resumed run they may begin later
        epoch = latest if settled is None else min(settled, latest)
        behind = next((note for note in notes if note["epoch"] >= epoch), None)  # a resumed run may have left some out
        if behind is None:  # it has not ended
            return None
        return epoch if self.strategy == "epoch" else int(behind["step"])

    def _set_hardness(self, model: nn.Module, optimizer: Any, state: TrainerState) -> None:
        self._move_hardness(model, optimizer, state)
        if self._resumed_hardness >= 1:
            tell_softer(self._resumed_hardness, largest_override(model))
        self._resumed_hardness = 0.0

    def _move_hardness(self, model: nn.Module, optimizer: Any, state: TrainerState) -> None:
        progress = self.progress(state)
        if progress is None:
            release_hardness(model)
        else:
            hold_averaged_hardness(optimizer, model)
            if self.targets is None and not noted(state, _TARGETS):
                release_hardness(model)
                measure = partial(measured_targets, model, self.data or [], self.swap_tolerance)
                decided_once(state, _TARGETS, self._epochs.number(state), measure)
            if self.rate == "tolerance":
                progress = self._bounded_progress(model, state, progress)
            self._anneal(model, state, progress)

    def _anneal(self, model: nn.Module, state: TrainerState, progress: float) -> None:
        anneal_hardness(model, progress, target_hardness=self.targets_at(state), schedule=self.schedule)

    def _bounded_progress(self, model: nn.Module, state: TrainerState, by_schedule: float) -> float:
        """The progress of this epoch under rate="tolerance", measured when the epoch first begins."""
        before = next((note[_PROGRESS] for note in reversed(noted(state, _PROGRESS))), 0.0)

        def gap(progress: float) -> float:
            return mean_divergence(model, self.data or [], lambda: move(before), lambda: move(progress))

        def measure() -> float:
            if by_schedule == 1 or before == 1:
                return 1.0
            return largest_move(gap, before, self.rate_tolerance)

        move = partial(self._anneal, model, state)
        return decided_once(state, _PROGRESS, self._epochs.number(state), measure)
