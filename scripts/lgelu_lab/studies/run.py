"""One run of one benchmark: train, harden, substitute, record."""

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PrinterCallback, set_seed
from transformers.activations import ACT2FN

from hf_lgelu import save_card_facts
from hf_lgelu.environment import hardware, package_versions
from hf_lgelu.models.checkpoint import save_checkpoint
from hf_lgelu.models.profile import hardness_profile, initialize_hardness
from hf_lgelu.models.registry import ACTIVATION_NAME
from hf_lgelu.models.sites import find_sites
from hf_lgelu.models.surgery import substitute_relu
from hf_lgelu.training.arguments import LambdaGELUTrainingArguments
from hf_lgelu.training.hardening import resolve_target_hardness
from hf_lgelu.training.trainer import LambdaGELUTrainer
from lgelu_lab.benchmarks.swish import register_learnable_swish
from lgelu_lab.benchmarks.table import Benchmark, BenchmarkData, DataOptions, ModelOptions
from lgelu_lab.studies.arguments import RunArguments, check_benchmark, data_options, model_options
from lgelu_lab.studies.augmentation import AugmentationCallback
from lgelu_lab.studies.cards import card_facts
from lgelu_lab.studies.experiments import experiment_name
from lgelu_lab.studies.records import RECORD_FILE, EpochRecord, RunRecord, read_record, write_record

RELU_FOLDER = "relu"

Load = Callable[[DataOptions, ModelOptions], BenchmarkData]


def run_benchmark(run: RunArguments, training: LambdaGELUTrainingArguments, *, load: Load | None = None) -> RunRecord:
    """Train one model and write `output_dir`/record.json (schema: records.py).

    `load` replaces the benchmark's own, e.g. by one that keeps the rows for the next run.

    With `run.save_final_model`, the model goes to `output_dir` and, after hardening, its ReLU network
    to `output_dir`/relu. Resumes with `training.resume_from_checkpoint`.

    Raises:
        ValueError: an argument is wrong, the data are not there, or `output_dir` has a record that this
            version cannot read and would overwrite.
        RuntimeError: training ended without an evaluation, so that there is nothing to record.
    """
    register_learnable_swish()
    benchmark = check_benchmark(run.benchmark)
    _check(run, training)
    options = model_options(run)
    data = (load or benchmark.load)(data_options(run), options)
    if training.device.type != "cpu" and training.dataloader_num_workers == 0:
        data = data.to(training.device)
        training.dataloader_pin_memory = False  # the rows are there already
    set_seed(training.seed)
    model = benchmark.build_model(run.activation, data, options)
    if run.channels_last:
        model.to(memory_format=torch.channels_last)
    learns_hardness = run.activation == ACTIVATION_NAME
    training.require_lambda_gelu = learns_hardness
    if learns_hardness:
        initialize_hardness(
            model, run.init_mode, run.init_hardness, run.high_hardness, temperature=run.temperature,
            inputs=benchmark.collate([data.train[i] for i in range(2)]),
        )  # fmt: skip
    initial_hardness = hardness_profile(model) if learns_hardness else {}

    trainer = LambdaGELUTrainer(
        model=model,
        args=training,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=benchmark.collate,
        compute_metrics=benchmark.compute_metrics,
        preprocess_logits_for_metrics=benchmark.preprocess_logits,
        processing_class=data.processor,
        callbacks=[AugmentationCallback(data.train)] if hasattr(data.train, "set_epoch") else None,
    )
    if training.disable_tqdm:
        trainer.remove_callback(PrinterCallback)  # transformers prints each log where it draws no progress bar
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    record = _record(benchmark, run, trainer, data, initial_hardness, time.perf_counter() - started)
    if run.save_final_model:
        trainer.save_model()
    if trainer.is_world_process_zero():
        if run.save_final_model:
            _save_relu(type(model), data.processor, Path(training.output_dir), hardened=training.harden)
        write_record(record, training.output_dir)
        if record.last.hardness:
            save_card_facts(replace(card_facts(record), checkpoint=None), training.output_dir)
    trainer.accelerator.wait_for_everyone()
    return record


def _save_relu(model_class: type[PreTrainedModel], processor: Any, folder: Path, *, hardened: bool) -> None:
    """The ReLU network of a hardened model, with its tokenizer or image processor, to `folder`/relu.

    None is left there by a run that hardened nothing.
    """
    if (folder / RELU_FOLDER).exists():
        shutil.rmtree(folder / RELU_FOLDER)
    if hardened:
        # Not the trained module: under FSDP this process holds a part of it alone.
        model = model_class.from_pretrained(folder, use_safetensors=True)
        substitute_relu(model)
        save_checkpoint(model, folder / RELU_FOLDER, processor)


def _check(run: RunArguments, training: LambdaGELUTrainingArguments) -> None:
    if training.harden and run.activation != ACTIVATION_NAME:
        raise ValueError(f"only {ACTIVATION_NAME} hardens, got activation {run.activation!r} with harden=True")
    if training.eval_strategy == "no":
        raise ValueError("a run that is never evaluated has nothing to record; set eval_strategy to 'epoch' or 'steps'")
    if run.activation not in ACT2FN:
        raise ValueError(f"unknown activation {run.activation!r}; accepted: {', '.join(sorted(ACT2FN))}")
    if (Path(training.output_dir) / RECORD_FILE).exists():
        read_record(training.output_dir)  # raises for one of another schema, which must not be lost


def run_name(run: RunArguments, training: LambdaGELUTrainingArguments) -> str:
    """A short name that tells a run from its neighbours, e.g. "mlp-adult/lambda_gelu-uniform-hardened-seed0"."""
    configuration = {
        "activation": run.activation, "harden": training.harden, "relufication": training.relufication,
    }  # fmt: skip
    if run.activation == ACTIVATION_NAME:
        configuration["init_mode"] = run.init_mode
    return experiment_name(run.benchmark, configuration, training.seed)


def _record(
    benchmark: Benchmark,
    run: RunArguments,
    trainer: LambdaGELUTrainer,
    data: BenchmarkData,
    initial_hardness: dict[str, float],
    seconds: float,
) -> RunRecord:
    processes = trainer.accelerator.num_processes
    evaluations = [entry for entry in trainer.state.log_history if f"eval_{benchmark.metric}" in entry]
    if not evaluations:
        raise RuntimeError(
            f"training ended after {trainer.state.global_step} steps without an evaluation, so there is nothing to "
            "record; look at num_train_epochs, max_steps, eval_strategy, eval_steps and eval_delay"
        )
    return RunRecord(
        name=trainer.args.run_name or run_name(run, trainer.args),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
        config={
            **run_config(run, trainer.args, processes),
            # accelerate's configuration file may ask for it as well
            "bf16": trainer.accelerator.mixed_precision == "bf16",
        },
        data={
            "train_samples": len(data.train),
            "eval_samples": len(data.eval),
            "eval_split": data.eval_split,
            "source": benchmark.hub_id or "scikit-learn",
            "classes": len(data.label_names) or None,
        },
        model=_describe(trainer.model),
        metric=benchmark.metric,
        greater_is_better=benchmark.greater_is_better,
        initial_hardness=initial_hardness,
        epochs=tuple(_epoch(entry, benchmark.metric) for entry in evaluations),
        versions=package_versions(),
        hardware=hardware(processes),
    )


def run_config(run: RunArguments, training: LambdaGELUTrainingArguments, processes: int = 1) -> dict[str, Any]:
    """The `config` of a run's record: everything that decides what comes out, apart from the data."""
    of_run = ("benchmark", "activation", "init_mode", "init_hardness", "high_hardness", "temperature")
    of_training = (
        *("hardness_lr_multiplier", "harden", "target_hardness", "tolerance", "switch_fraction"),
        *("hardening_schedule", "hardening_strategy", "seed", "optim", "optim_args", "learning_rate"),
        *("weight_decay", "lr_scheduler_type", "warmup_steps", "max_grad_norm", "num_train_epochs", "max_steps"),
        *("gradient_accumulation_steps", "bf16", "relufication"),
    )
    values = {name: getattr(run, name) for name in of_run} | {name: getattr(training, name) for name in of_training}
    values["train_batch_size"] = training.per_device_train_batch_size * training.gradient_accumulation_steps * processes
    values |= {
        name: getattr(run, name)
        for name in ("validation_fraction", "max_train_samples", "max_eval_samples", "channels_last")
    }
    values |= asdict(model_options(run))
    if training.harden:
        values["target_hardness"] = resolve_target_hardness(training.target_hardness, training.tolerance)
    return {name: getattr(value, "value", value) for name, value in values.items()}


def _describe(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "activation_sites": len(find_sites(model)),
    }


def _epoch(entry: dict[str, Any], metric: str) -> EpochRecord:
    prefix = "hardness/"
    return EpochRecord(
        epoch=entry["epoch"],
        score=entry[f"eval_{metric}"],
        loss=entry.get("eval_loss"),
        relu_score=entry.get(f"eval_relu_{metric}"),
        relu_loss=entry.get("eval_relu_loss"),
        relu_max_logit_change=entry.get("eval_relu_max_logit_change"),
        relu_unchanged_predictions=entry.get("eval_relu_unchanged_predictions"),
        hardness={
            name.removeprefix(prefix): value
            for name, value in entry.items()
            if name.startswith(prefix) and name != f"{prefix}mean"
        },
    )
