"""A Trainer that learns, hardens and reports λ-GELU."""

import json
import os
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from accelerate.utils import find_batch_size
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from hf_lgelu.models.config_keys import gate_names
from hf_lgelu.models.example_run import same_randomness
from hf_lgelu.models.optimizer_groups import check_rate
from hf_lgelu.models.sites import (
    LEARNED_KINDS,
    SMOOTH_KINDS,
    find_sites,
    lambda_gelu_modules,
    raw_parameters,
    require_lambda_gelu,
)
from hf_lgelu.models.surgery import TemporaryRelu, temporary_relu
from hf_lgelu.training.arguments import LambdaGELUTrainingArguments
from hf_lgelu.training.callbacks import HardeningCallback
from hf_lgelu.training.evaluation import (
    compare_outputs,
    comparison_metrics,
    metrics_of_both,
    on_both,
    random_state_kept,
    with_relu_metrics,
)
from hf_lgelu.training.hardening import HARDENED_FRACTION, Target, is_hardened
from hf_lgelu.training.hardness_log import HardnessLogCallback
from hf_lgelu.training.optim import hardness_learning_rate, separate_hardness_group
from hf_lgelu.training.relufication import RELUFIED_KINDS, RelufyCallback

logger = logging.get_logger(__name__)

_MEASURED_BATCHES = 8


class LambdaGELUTrainer(Trainer):
    """transformers' Trainer for models with λ-GELU: it learns, hardens and reports λ.

    - s has its own parameter group, with learning rate c·η and no weight decay, in every optimizer
      that keeps ordinary groups; the others are refused;
    - `args.harden` hardens (`HardeningCallback`), and a best checkpoint is then selected among
      hardened epochs only (every λ at least half the target);
    - every layer's λ is in the training log (`HardnessLogCallback`);
    - every evaluation reports each metric twice, as it is and, as `eval_relu_<metric>`, with ReLU
      substituted, with the largest logit change and the share of unchanged predictions. What is
      substituted is what `substitute_relu` would exchange: every λ-GELU. In a model without any, it is
      every smooth gate (the direct swap).

    Takes what Trainer takes, with `args` a LambdaGELUTrainingArguments. A model without λ-GELU raises
    unless `args.require_lambda_gelu` is off.

    What differs from Trainer on purpose: `lr_scheduler_type="greedy"` and a floor of `reduce_lr_on_plateau` are
    refused where there is a λ-GELU, since they lose the ratio of the two learning rates; s has no weight decay,
    whatever `weight_decay` says; a HardnessLogCallback stands before the other callbacks; a best checkpoint of a
    hardening run is a hardened one; and an evaluation takes a second forward pass a batch (with `batch_eval_metrics`
    or without `eval_do_concat_batches`, a second loop over the data), in the random state of the first.
    `report_substitution=False` does without it. With DeepSpeed, hardening is refused.

    Generation works by inheriting from both: `class Mine(LambdaGELUTrainer, Seq2SeqTrainer)`, the arguments likewise.

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
    ['eval_relu_loss', 'eval_relu_max_logit_change', 'eval_relu_unchanged_predictions']
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
        _check_arguments(args)
        super().__init__(model, args, *others, **options)
        if lambda_gelu_modules(self.model):
            _check_ratio_of_rates(self.args)
        self._compares_substitution = False
        self._substitution: TemporaryRelu | None = None
        self._keeps_logits = True
        self._told_soft = False
        if self.args.require_lambda_gelu:
            require_lambda_gelu(self.model)
        if self.args.harden and self._hardening_callback() is None:
            self.add_callback(_hardening_callback(self.args))
        if self.args.relufication:
            self.add_callback(RelufyCallback(self.args.switch_fraction))
        if self.args.log_hardness and lambda_gelu_modules(self.model):
            HardnessLogCallback.add_to(self)
        self._adopt_callbacks()

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        super().add_callback(callback)
        self._adopt_callbacks()

    def train(self, *args: Any, **options: Any) -> TrainOutput:
        """As Trainer's."""
        hardening = self._hardening_callback()
        if hardening is None:
            return super().train(*args, **options)
        given = hardening.data
        if hardening.needs_data:
            hardening.data = self._batches_to_measure_on()
        hardening.selects_hardened_checkpoints = True  # by this trainer; another may use the callback after it
        try:
            return super().train(*args, **options)
        finally:
            hardening.selects_hardened_checkpoints, hardening.data = False, given

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Trainer's optimizer, with the raw hardness moved to a group of its own.

        An optimizer that was passed to the trainer is left as it is.
        """
        optimized = self.model if model is None else model
        modules = lambda_gelu_modules(optimized)
        learns = any(s.requires_grad for _, module in modules for s in raw_parameters(module))
        if self.optimizer is None:
            super().create_optimizer(model)
            if learns:
                separate_hardness_group(self.optimizer, optimized, self.args.hardness_lr_multiplier)
        elif learns and hardness_learning_rate(self.optimizer) is None:
            logger.warning(
                "The optimizer that was passed has no hardness group: the raw hardness learns and decays as the "
                "weights beside it. Build it from hardness_parameter_groups(...), or call "
                "separate_hardness_group(optimizer, model) before passing it"
            )
        return self.optimizer

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **options: Any,
    ) -> tuple[Any, Any, Any]:
        """As Trainer's; inside an evaluation, the logits come with those of the ReLU substitution."""
        if not self._compares_substitution:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **options)
        # Both passes move the batch to the device; the second finds it there. Not by _prepare_inputs, which a
        # subclass may have do more than that, and which each pass calls.
        inputs = self._prepare_input(inputs)
        if self._substitution is None or not self._substitution.fits(self.model):
            self._substitution = TemporaryRelu(self.model, kinds=self._substituted_kinds())
        # A model that draws in an evaluation (a masked autoencoder) draws the same twice, and as often as in Trainer.
        with random_state_kept(self.model), self._substitution.applied():
            relu_loss, relu_logits, _ = super().prediction_step(model, inputs, False, ignore_keys, **options)
        loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys, **options)
        batch_size = find_batch_size(inputs) or 1
        rows = compare_outputs(loss, logits, relu_loss, relu_logits, labels, batch_size)
        if not self._keeps_logits or logits is None:
            return loss, (rows,), None
        return loss, (rows, logits, relu_logits), labels

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As Trainer's; every metric is reported as it is and with ReLU substituted."""
        if not self.args.report_substitution or not find_sites(self.model):
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        if self.args.batch_eval_metrics or not self.args.eval_do_concat_batches:
            return self._evaluate_twice(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        compute_metrics, preprocess = self.compute_metrics, self.preprocess_logits_for_metrics
        self._compares_substitution, self._keeps_logits = True, not prediction_loss_only
        self.compute_metrics = None
        if compute_metrics is not None and self._keeps_logits:
            self.compute_metrics = metrics_of_both(compute_metrics, metric_key_prefix)
        if preprocess is not None:
            self.preprocess_logits_for_metrics = on_both(preprocess)
        try:
            output = super().evaluation_loop(dataloader, description, False, ignore_keys, metric_key_prefix)
        finally:
            self._compares_substitution, self._substitution = False, None
            self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess
        rows, *logits = output.predictions
        metrics = {**output.metrics, **comparison_metrics(rows, metric_key_prefix)}
        return output._replace(predictions=logits[0] if logits else None, metrics=metrics)

    def _evaluate_twice(self, *args: Any) -> EvalLoopOutput:
        """Two loops over the data, for options under which Trainer keeps no logits of the whole set together."""
        prefix = args[-1]
        with random_state_kept(self.model), temporary_relu(self.model, kinds=self._substituted_kinds()):
            relu_metrics = super().evaluation_loop(*args).metrics
        output = super().evaluation_loop(*args)
        return output._replace(metrics=with_relu_metrics(output.metrics, relu_metrics, prefix))

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        if self.args.relufication and find_sites(self.model, RELUFIED_KINDS):
            return False  # ReLU is not in yet
        hardening = self._hardening_callback()
        targets = None if hardening is None else hardening.targets_at(self.state)
        if hardening is None or (targets is not None and is_hardened(self.model, targets)):
            return super()._determine_best_metric(metrics, trial)
        selects = self.args.load_best_model_at_end or self.args.save_strategy == "best"
        if selects and not self._told_soft:
            self._told_soft = True
            logger.warning(
                "The gates are still soft: no epoch counts as the best before every λ has reached "
                f"{HARDENED_FRACTION:.0%} of the target{self._target_text(targets)}, since substituting ReLU in an "
                "earlier one would destroy it"
            )
        return False

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        _check_checkpoint_activations(resume_from_checkpoint, self.model if model is None else model)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _substituted_kinds(self) -> tuple[str, ...]:
        return LEARNED_KINDS if lambda_gelu_modules(self.model) else SMOOTH_KINDS

    def _target_text(self, targets: Mapping[str, Target] | None) -> str:
        """ " 159.577"; nothing where each gate has a target of its own."""
        sites = lambda_gelu_modules(self.model)
        if targets is None or any(name in targets for name, _ in sites):
            return ""
        return " " + " or ".join(f"{target:.6g}" for target in sorted({targets[module.gate] for _, module in sites}))

    def _batches_to_measure_on(self) -> list[Any] | None:
        """The first batches of the evaluation data, the same on every process."""
        dataset = self.eval_dataset
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()), None)
        if dataset is None:
            return None
        prepared = self.get_eval_dataloader(dataset)
        loader = DataLoader(prepared.dataset, batch_size=self.args.eval_batch_size, collate_fn=prepared.collate_fn)
        with same_randomness():
            return list(islice(loader, _MEASURED_BATCHES))

    def _hardening_callback(self) -> HardeningCallback | None:
        callbacks = self.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, HardeningCallback)), None)

    def _adopt_callbacks(self) -> None:
        for callback in list(self.callback_handler.callbacks):
            if isinstance(callback, HardnessLogCallback):
                HardnessLogCallback.add_to(self)


def _hardening_callback(args: LambdaGELUTrainingArguments) -> HardeningCallback:
    return HardeningCallback(
        target_hardness=args.target_hardness,
        tolerance=args.tolerance,
        switch_fraction=args.switch_fraction,
        schedule=args.hardening_schedule,
        strategy=args.hardening_strategy,
        switch=args.hardening_switch,
        plateau_tolerance=args.plateau_tolerance,
        rate=args.hardening_rate,
        rate_tolerance=args.rate_tolerance,
    )


def _check_arguments(args: Any) -> None:
    if not isinstance(args, LambdaGELUTrainingArguments):
        raise TypeError(f"args must be LambdaGELUTrainingArguments, got {type(args).__name__}")
    check_rate("hardness_lr_multiplier", args.hardness_lr_multiplier)
    if args.harden and args.relufication:
        raise ValueError("harden moves λ to ReLU and relufication puts ReLU in at once: give one of them")
    if args.harden:
        _hardening_callback(args)  # raises on wrong options now, not at the first epoch


def _check_ratio_of_rates(args: LambdaGELUTrainingArguments) -> None:
    if args.lr_scheduler_type == "greedy":
        raise ValueError(
            "lr_scheduler_type 'greedy' changes each group's learning rate on its own and loses the ratio "
            "hardness_lr_multiplier; choose another scheduler"
        )
    if args.lr_scheduler_type == "reduce_lr_on_plateau" and (args.lr_scheduler_kwargs or {}).get("min_lr"):
        raise ValueError(
            "min_lr of reduce_lr_on_plateau would stop both learning rates at the same floor and lose the ratio "
            "hardness_lr_multiplier; leave min_lr at 0"
        )


def _check_checkpoint_activations(folder: str, model: nn.Module) -> None:
    """Refuse to resume a model from a checkpoint with other activations: transformers would load it silently."""
    keys = _checkpoint_keys(folder)
    if not keys:  # sharded or adapters only
        return
    saved = {name for name in keys if name.endswith("raw_hardness")}
    present = {_unwrapped(f"{name}.raw_hardness".removeprefix(".")) for name, _ in lambda_gelu_modules(model)}
    if saved != present:
        raise ValueError(
            f"the checkpoint {folder} holds the hardness of {len(saved)} λ-GELU activations and the model has "
            f"{len(present)}: they are not the same network (was ReLU substituted in one of them?). Resume with the "
            "model as it was when the checkpoint was written"
        )
    config = os.path.join(folder, CONFIG_NAME)
    if not isinstance(model, PreTrainedModel) or not os.path.isfile(config):
        return
    with open(config, encoding="utf-8") as file:
        written, built = gate_names(file.read()), gate_names(model.config.to_json_string())
    if written and built and written != built:
        raise ValueError(
            f"the activations of the checkpoint {folder} are {', '.join(sorted(written))} and the model's "
            f"{', '.join(sorted(built))}, which is another function of the same weights. Resume with the model as it "
            "was when the checkpoint was written"
        )


def _unwrapped(name: str) -> str:
    """The name as a checkpoint has it: without what torch.compile, FSDP and activation checkpointing add."""
    for wrapper in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def _checkpoint_keys(folder: str) -> set[str]:
    index, weights = os.path.join(folder, SAFE_WEIGHTS_INDEX_NAME), os.path.join(folder, SAFE_WEIGHTS_NAME)
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            return set(json.load(file)["weight_map"])
    if os.path.isfile(weights):
        from safetensors import safe_open

        with safe_open(weights, framework="pt") as file:
            return set(file.keys())
    return set()
