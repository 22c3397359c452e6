"""A Trainer callback that logs the hardness of every layer."""

from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_lgelu.models.operable import require_unflattened
from hf_lgelu.models.profile import hardness_profile
from hf_lgelu.models.sites import lambda_gelu_modules, require_lambda_gelu
from hf_lgelu.training.optim import hardness_learning_rate
from hf_lgelu.training.refusals import tell_unreached


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
