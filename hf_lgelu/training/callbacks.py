"""The Trainer callbacks that harden and that log λ.

HardeningCallback depends only on the trainer's position and the model. So a run that is resumed from any checkpoint
goes on as if it had never stopped.
"""

from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.utils import logging

from hf_lgelu.models.hardening import (
    HARDENED_FRACTION,
    anneal_hardness,
    freeze_hardness,
    hardening_progress,
    hardness_profile,
    is_hardened,
    release_hardness,
    smallest_soft_hardness,
    switch_position,
)
from hf_lgelu.models.optimizer_groups import hardness_group
from hf_lgelu.networks.sites import lambda_gelu_modules
from hf_lgelu.training.arguments import HardeningConfig, LambdaGELUTrainingArguments
from hf_lgelu.training.refusals import refuse_to_harden, require_gradient, warn_released, warn_ungrouped

logger = logging.get_logger(__name__)


class HardeningCallback(TrainerCallback):
    """Algorithm 1 of the paper: learn λ, then freeze s and move every λ to a target while the weights train on.

    With T epochs and e_s = ⌊switch_fraction·T⌋, epoch e > e_s trains and is evaluated with
    λ(e) = λ(e_s) + (e − e_s)/(T − e_s)·(target − λ(e_s)), so the whole last epoch has the target (linear schedule).

    At the end of each epoch, λ of every gate goes into `trainer.state.log_history`, whatever `logging_steps` is.

    Args:
        config: the options of hardening; by default the paper's.

    The callback is for a plain Trainer, with an optimizer of `hardness_parameter_groups`. With another optimizer, s
    learns as slowly as the weights and decays with them, and a warning says so. `LambdaGELUTrainer` makes the callback
    itself where its arguments have `harden=True`. It gives s its learning rate, and selects the best checkpoint among
    hardened epochs only.

    Raises, when training begins:
        ValueError: DeepSpeed is used, a target names no gate, or an s has requires_grad=False. In a plain Trainer also
            for `load_best_model_at_end` and `save_strategy="best"`, which would select a soft epoch.
        RuntimeError: the optimizer does not hold s.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> rows = [{"features": torch.randn(4), "labels": i % 2} for i in range(8)]
    >>> from transformers import Trainer, TrainingArguments
    >>> args = TrainingArguments(
    ...     output_dir="run", num_train_epochs=4, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    ...     logging_steps=1,
    ... )
    >>> config = hf_lgelu.HardeningConfig(
    ...     tolerance=0.01, hardening_schedule="geometric", hardening_strategy="steps"
    ... )
    >>> callback = hf_lgelu.HardeningCallback(config)
    >>> groups = hf_lgelu.hardness_parameter_groups(model, learning_rate=1e-3)
    >>> optimizers = torch.optim.AdamW(groups), None  # Trainer makes the scheduler
    >>> trainer = Trainer(model, args, train_dataset=rows, callbacks=[callback], optimizers=optimizers)
    >>> _ = hf_lgelu.HardnessLogCallback.add_to(trainer)
    >>> _ = trainer.train()  # doctest: +ELLIPSIS
    {...}
    >>> [round(value, 3) for value in hf_lgelu.hardness_profile(model).values()]
    [79.788, 79.788]
    >>> [name for name in trainer.state.log_history[0] if name.startswith("hardness/")]
    ['hardness/layers.0.activation', 'hardness/layers.1.activation', 'hardness/mean']
    """

    def __init__(self, config: HardeningConfig | None = None) -> None:
        self.config = HardeningConfig() if config is None else config
        self._epoch: int | None = None  # the number of the present epoch, from 1 on
        self._gradient_is_checked = False

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, model: nn.Module, optimizer: Any = None, **others: Any
    ) -> None:
        config = self.config
        is_of_own_trainer = isinstance(args, LambdaGELUTrainingArguments)  # no other trainer needs them
        refuse_to_harden(config, args, state, model, optimizer)
        self._epoch, self._gradient_is_checked = None, False
        # LambdaGELUTrainer may have a best checkpoint of an earlier, soft run. A plain Trainer selects none.
        if is_of_own_trainer and not is_hardened(model, config.targets):
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
        if state.global_step == 0:
            warn_released(model)
        if config.switch_fraction == 0:
            return
        if not is_of_own_trainer:  # LambdaGELUTrainer warns itself
            warn_ungrouped(optimizer, model)
        by_step = config.hardening_strategy == "steps"
        total, unit = (state.max_steps, "steps") if by_step else (state.num_train_epochs, "epochs")
        if switch_position(total, config.switch_fraction) == 0:
            logger.warning(
                f"With {total} {unit}, ⌊{config.switch_fraction}·{total}⌋ = 0: hardening begins at once and "
                "λ is never learned. Train longer, or harden with hardening_strategy='steps'"
            )

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, model: nn.Module, **others: Any) -> None:
        # Epochs are counted here. `state.epoch` is the number of steps over the planned steps of an epoch. It keeps a
        # fraction if an epoch ends early (a loader with fewer batches than its length, `control.should_epoch_stop`).
        # After a resume none has been counted, and `state.epoch` says where the run goes on.
        self._epoch = max((self._epoch or 0) + 1, _epoch_in(state))
        if self.config.hardening_strategy == "epoch":
            self._release_or_anneal(model, state)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, model: nn.Module, **others: Any) -> None:
        if self.config.hardening_strategy == "steps":
            self._release_or_anneal(model, state)

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: Any, model: nn.Module, **others: Any
    ) -> None:
        # `global_step` has not moved since the step began, so this is the progress that λ was set for.
        if self.progress(state) is not None:
            freeze_hardness(model)
        elif not self._gradient_is_checked:  # in the first step in which s is learned
            require_gradient(model)
            self._gradient_is_checked = True

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, model: nn.Module, **others: Any) -> None:
        # Whatever `logging_steps` is, the history has λ of each epoch. Trainer saves it with the next checkpoint.
        state.log_history.append({**_named_hardness(model), "epoch": state.epoch, "step": state.global_step})

    def on_train_end(self, args: Any, state: TrainerState, control: Any, model: nn.Module, **others: Any) -> None:
        soft = smallest_soft_hardness(model, self.config.targets) if lambda_gelu_modules(model) else None
        if soft is not None:
            logger.warning(
                f"Training has ended with soft gates (down to λ = {soft:.4g}, less than {HARDENED_FRACTION:.0%} of its "
                "target): with ReLU instead, the network is another one. Train on to the last epoch"
            )

    def progress(self, state: TrainerState) -> float | None:
        """The progress of hardening at the trainer's position, in [0, 1]; None while λ is learned."""
        position, total = state.global_step + 1, state.max_steps
        if self.config.hardening_strategy == "epoch":
            total = int(state.num_train_epochs)
            position = self._epoch or _epoch_in(state)  # before the first epoch begins, none has been counted
        return hardening_progress(min(position, total), total, self.config.switch_fraction)

    def _release_or_anneal(self, model: nn.Module, state: TrainerState) -> None:
        config, progress = self.config, self.progress(state)
        if progress is None:
            release_hardness(model)
        else:
            anneal_hardness(model, progress, target_hardness=config.targets, schedule=config.hardening_schedule)


def _epoch_in(state: TrainerState) -> int:
    return int(state.epoch or 0) + 1  # with a fraction in the middle of an epoch, as after a resume


def _named_hardness(model: nn.Module) -> dict[str, float]:
    """λ under the names that logs have: `hardness/<gate>` and `hardness/mean`."""
    profile = hardness_profile(model)
    mean = sum(profile.values()) / len(profile)
    return {**{f"hardness/{name}": hardness for name, hardness in profile.items()}, "hardness/mean": mean}


class HardnessLogCallback(TrainerCallback):
    """Adds to every training log each gate's λ, their mean and the learning rate of s.

    The keys are `hardness/<module name>` as in `hardness_profile`, `hardness/mean` and `hardness_learning_rate`. The
    trainer's `state.log_history` has them for evaluations too.

    LambdaGELUTrainer has the callback by default. It must run before the reporters (tensorboard, trackio, wandb). A
    callback that is passed to a plain Trainer runs after them: call `HardnessLogCallback.add_to(trainer)` instead.
    """

    def __init__(self) -> None:
        self._learning_rate: float | None = None
        self._runs_first = False

    @classmethod
    def add_to(cls, trainer: Trainer) -> "HardnessLogCallback":
        """Put the trainer's HardnessLogCallback, or a new one, in front of its reporters."""
        callback = trainer.pop_callback(cls) or cls()
        trainer.callback_handler.callbacks.insert(0, callback)
        callback._runs_first = True
        return callback

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        if not self._runs_first:
            raise RuntimeError(
                "this HardnessLogCallback runs after the reporters, which would never see λ: call "
                "HardnessLogCallback.add_to(trainer) instead of passing the callback to a plain Trainer"
            )

    def on_optimizer_step(self, args: Any, state: TrainerState, control: Any, optimizer: Any, **others: Any) -> None:
        # Trainer logs the learning rate of this step, but the scheduler moves on before the log.
        group = hardness_group(optimizer)
        self._learning_rate = None if group is None else float(group["lr"])

    def on_log(
        self, args: Any, state: TrainerState, control: Any, model: nn.Module, logs: Any = None, **others: Any
    ) -> None:
        evaluated = logs is not None and any(name.startswith("eval_") for name in logs)
        if logs is None or not ("loss" in logs or evaluated):
            return
        if not lambda_gelu_modules(model):  # ReLU was substituted after the trainer was made
            return
        added = _named_hardness(model)
        if self._learning_rate is not None:
            added["hardness_learning_rate"] = self._learning_rate
        if state.log_history:
            state.log_history[-1].update(added)
        if not evaluated:  # the reporters have λ of this step from the training log
            logs.update(added)
