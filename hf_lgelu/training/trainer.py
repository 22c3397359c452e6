"""A Trainer that learns, hardens and reports λ."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, Trainer
from transformers.trainer_utils import EvalLoopOutput

from hf_lgelu.comparing.comparison import LiveUnits
from hf_lgelu.models.hardening import is_hardened
from hf_lgelu.models.optimizer_groups import check_rate, separate_hardness_group
from hf_lgelu.models.surgery import TemporaryRelu
from hf_lgelu.networks.outputs import IGNORED_LABEL, labels_of_predictions
from hf_lgelu.networks.run import buffers_restored
from hf_lgelu.networks.sites import LEARNED_KINDS, SMOOTH_KINDS, find_sites, lambda_gelu_modules, require_lambda_gelu
from hf_lgelu.training.arguments import LambdaGELUTrainingArguments
from hf_lgelu.training.callbacks import HardeningCallback, HardnessLogCallback
from hf_lgelu.training.refusals import refuse_with_gates, warn_not_learning, warn_ungrouped
from hf_lgelu.training.resume import load_renamed, require_same_gates

_COLLECTED = ("_metrics", "_stored_metrics", "accum_loss_components")
"""The attributes where the losses of TRL's and sentence-transformers' trainers collect numbers for their logs."""


class LambdaGELUTrainer(Trainer):
    """transformers' Trainer for models with λ-GELU: it learns, hardens and reports λ.

    - s has its own parameter group, with learning rate c·η and no weight decay. Optimizers without ordinary groups are
      refused.
    - `args.harden` hardens (`HardeningCallback`). The best checkpoint is then one of the hardened epochs.
    - Every gate's λ is in the training log (`HardnessLogCallback`).
    - Every evaluation reports the loss and each metric twice: for the model as it is and, as `eval_relu_<metric>`, with
      ReLU instead of every λ-gate (in a model without λ-gates, of every smooth gate). A second loop over the data, from
      the random state of the first, measures this. `report_substitution=False` leaves this loop out.
      `eval_relu_live_units` is the share of the ReLUs' outputs that are not zero.
    - A checkpoint whose tensors have other names than the model's, as in many families of transformers, is resumed
      whole. A checkpoint that lacks a tensor is refused.

    The arguments are those of Trainer, with LambdaGELUTrainingArguments for `args`. `compute_metrics` may be a module
    of `evaluate` (`evaluate.load("accuracy")`). A model without λ-GELU is refused unless `args.require_lambda_gelu` is
    off.

    With a λ-gate, schedulers that lose the ratio of the two learning rates are refused. With DeepSpeed, hardening is
    refused.

    To combine this trainer with another, inherit from both: `class Mine(LambdaGELUTrainer, Seq2SeqTrainer)` and
    `@dataclass class Args(LambdaGELUTrainingArguments, Seq2SeqTrainingArguments)`. An `evaluator` of
    sentence-transformers runs once, with the gates as they are.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> rows = [{"features": torch.randn(4), "labels": i % 2} for i in range(8)]
    >>> args = hf_lgelu.LambdaGELUTrainingArguments(
    ...     output_dir="run", harden=True, num_train_epochs=4, use_cpu=True, report_to=[], save_strategy="no",
    ...     disable_tqdm=True, logging_strategy="no",
    ... )
    >>> trainer = hf_lgelu.LambdaGELUTrainer(model, args, train_dataset=rows, eval_dataset=rows)
    >>> _ = trainer.train()  # doctest: +ELLIPSIS
    {...}
    >>> [round(value, 3) for value in hf_lgelu.hardness_profile(model).values()]
    [159.577, 159.577]
    >>> sorted(name for name in trainer.evaluate() if "relu" in name)  # doctest: +ELLIPSIS
    {...}
    ['eval_relu_live_units', 'eval_relu_loss']
    """

    args: LambdaGELUTrainingArguments
    compute_metrics: Any
    preprocess_logits_for_metrics: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: LambdaGELUTrainingArguments | None = None,
        *others: Any,
        **options: Any,
    ) -> None:
        args = LambdaGELUTrainingArguments(output_dir="tmp_trainer") if args is None else args  # Trainer's own default
        if not isinstance(args, LambdaGELUTrainingArguments):
            raise TypeError(f"args must be LambdaGELUTrainingArguments, got {type(args).__name__}")
        module = options.get("compute_metrics")
        if hasattr(module, "compute"):  # evaluate.load("accuracy"), or evaluate.combine
            options["compute_metrics"] = lambda prediction, compute_result=True: metrics_of_module(
                module, self.model, prediction, compute_result
            )
        super().__init__(model, args, *others, **options)
        self._live: LiveUnits | None = None  # while ReLU is substituted
        self._hardening = HardeningCallback()  # among the callbacks if args.harden is on
        if args.require_lambda_gelu:
            require_lambda_gelu(self.model)
        if args.log_hardness and lambda_gelu_modules(self.model):
            HardnessLogCallback.add_to(self)
        self._prepare_training()  # each `train` does it again (`_hp_search_setup`); here errors come early

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Trainer's optimizer, with the raw hardness in its own group.

        An optimizer that was passed to the trainer stays as it is.
        """
        optimized = self.model if model is None else model
        learns = any(module.raw_hardness.requires_grad for _, module in lambda_gelu_modules(optimized))
        if self.optimizer is None:
            super().create_optimizer(model)
            if learns:
                separate_hardness_group(self.optimizer, optimized, self.args.hardness_lr_multiplier)
        elif learns and not hasattr(self.optimizer, "param_groups"):
            raise RuntimeError(
                f"{type(self.optimizer).__name__} has no parameter groups, so s has no learning rate that is known. "
                'With DeepSpeed, remove "optimizer" from its config: Trainer then makes one, with a group for s'
            )
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Trainer's scheduler. A scheduler that was passed stays as it is."""
        # Each training calls this method, after its model, checkpoint and optimizer are there.
        warn_ungrouped(self.optimizer, self.model)  # an optimizer that was passed, or made by a subclass
        if not self.args.harden:
            warn_not_learning(self.model)
        return super().create_scheduler(num_training_steps, optimizer)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Trainer's loop. A second loop, with ReLU substituted, gives the loss and every metric once more."""
        begin = random_state(self.args.device, dataloader)
        # The network as it is comes first, because Trainer prepares the model with its own modules.
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if not self.args.report_substitution or not find_sites(self.model):
            return output
        kinds = LEARNED_KINDS if lambda_gelu_modules(self.model) else SMOOTH_KINDS
        substitution = TemporaryRelu(self.model, kinds=kinds)
        loss_only = True if self.compute_metrics is None else prediction_loss_only  # else nobody reads the logits
        self._live = LiveUnits(substitution.gates)
        try:
            with loop_undone(self), buffers_restored(self.model), substitution.applied():
                begin()
                relu = super().evaluation_loop(dataloader, description, loss_only, ignore_keys, metric_key_prefix)
            counts = torch.tensor([self._live.live.total(), self._live.outputs.total()], device=self.args.device)
        finally:
            self._live = None
        found = {name.removeprefix(f"{metric_key_prefix}_"): value for name, value in relu.metrics.items()}
        found.pop("model_preparation_time", None)
        live, units = self.accelerator.reduce(counts).tolist()
        if units:
            found["live_units"] = live / units
        relu_metrics = {f"{metric_key_prefix}_relu_{name}": value for name, value in found.items()}
        return output._replace(metrics={**output.metrics, **relu_metrics})

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *others: Any, **options: Any) -> Any:
        """Trainer's step. In the loop with ReLU substituted, live units are counted."""
        with nullcontext() if self._live is None else self._live.counting(inputs):
            return super().prediction_step(model, inputs, *others, **options)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # ReLU would destroy a best epoch of soft gates.
        if self.args.harden and not is_hardened(self.model, self._hardening.config.targets):
            return False
        return super()._determine_best_metric(metrics, trial)

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        # The one method that each training calls first, with the model of model_init and the search's arguments.
        self._prepare_training()

    def _prepare_training(self) -> None:
        """Refuse options that cannot work or do nothing, and add or remove the callback that hardens."""
        check_rate("hardness_lr_multiplier", self.args.hardness_lr_multiplier)
        if lambda_gelu_modules(self.model):
            refuse_with_gates(self.args, self.accelerator)
        callbacks, own = self.callback_handler.callbacks, self._hardening
        if any(isinstance(callback, HardnessLogCallback) for callback in callbacks):
            HardnessLogCallback.add_to(self)  # before the reporters, where a user's own was added after them
        if any(isinstance(callback, HardeningCallback) and callback is not own for callback in callbacks):
            raise ValueError(
                "LambdaGELUTrainer has a HardeningCallback of its own, so another cannot be passed. Give harden=True "
                "and the options of hardening in `args`; target_hardness may be a mapping there, too"
            )
        if self.args.harden:
            own.config = self.args.hardening_config()
            callbacks += [] if own in callbacks else [own]
            return
        if own in callbacks:
            callbacks.remove(own)
        if given := self.args.given_hardening_options():
            raise ValueError(
                f"{', '.join(given)} would do nothing, because harden is off: give harden=True, or leave them out"
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        own = self.model if model is None else model
        # Another library's trainer may have its own form of checkpoints.
        by_other = super()._load_from_checkpoint.__func__ is not Trainer._load_from_checkpoint
        if not by_other:
            require_same_gates(resume_from_checkpoint, own)
        if by_other or self.is_fsdp_enabled or not load_renamed(resume_from_checkpoint, own):
            super()._load_from_checkpoint(resume_from_checkpoint, *(() if model is None else (model,)))

    def _load_best_model(self) -> None:
        by_other = super()._load_best_model.__func__ is not Trainer._load_best_model
        by_engine = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if by_other or by_engine or not load_renamed(self.state.best_model_checkpoint, self.model):
            super()._load_best_model()


def metrics_of_module(
    module: Any, model: nn.Module, prediction: EvalPrediction, compute_result: bool
) -> dict[str, float] | None:
    """The result of a module of `evaluate`, which compares labels with predictions, or integer labels with classes.

    Labels of −100 do not count. Labels of a causal language model are moved to the positions that predict them.
    `compute_result` comes from Trainer: with `batch_eval_metrics`, it is false before the last batch.
    """
    found, labels = (
        torch.as_tensor(given[0] if isinstance(given, tuple | list) else given)
        for given in (prediction.predictions, prediction.label_ids)
    )
    labels = labels_of_predictions(labels, model)
    if found.shape != labels.shape:
        found = found.view_as(labels) if labels.is_floating_point() else found.argmax(-1)
    counted = labels != IGNORED_LABEL
    module.add_batch(predictions=found[counted], references=labels[counted])
    return module.compute() if compute_result else None


def random_state(device: torch.device, data: DataLoader | None = None) -> Callable[[], None]:
    """A function that restores the present random state of Python, NumPy, torch and the sampler of `data`."""
    sources = [each for each in (torch, torch.get_device_module(device)) if hasattr(each, "get_rng_state")]
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), [s.get_rng_state() for s in sources]
    sampler = getattr(getattr(data, "batch_sampler", None), "sampler", None)
    generator = getattr(sampler, "generator", None)  # of Trainer's sampler that groups sequences by length
    of_generator = None if generator is None else generator.get_state()

    def put_back() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for source, state in zip(sources, of_torch, strict=True):
            source.set_rng_state(state)
        if generator is not None:
            generator.set_state(of_generator)

    return put_back


@contextmanager
def loop_undone(trainer: Trainer) -> Iterator[None]:
    """A block after which the random state and the numbers that a trainer's loss collects are as before.

    No callback sees the block, because progress bars count the batches of one loop.
    """
    put_back, handler = random_state(trainer.args.device), trainer.callback_handler
    kept, callbacks = {name: vars(trainer)[name] for name in _COLLECTED if name in vars(trainer)}, handler.callbacks
    vars(trainer).update(copy.deepcopy(kept))
    handler.callbacks = []
    try:
        yield
    finally:
        put_back()
        handler.callbacks = callbacks
        vars(trainer).update(kept)
