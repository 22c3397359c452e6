"""One run of one benchmark: train, harden, substitute, record."""

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.activations import ACT2FN
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from hf_lgelu import (
    HardeningConfig,
    LambdaGELUTrainer,
    LambdaGELUTrainingArguments,
    from_pretrained,
    hardness_profile,
    initialize_hardness,
    substitute_relu,
)
from hf_lgelu.activation.gates import GATES
from hf_lgelu.activation.hardness import hardness_for_tolerance
from hf_lgelu.comparing.comparison import OutputComparison
from hf_lgelu.environment import hardware, require
from hf_lgelu.models.checkpoint import save_checkpoint
from hf_lgelu.models.hardening import hardening_progress
from hf_lgelu.models.surgery import TemporaryRelu
from hf_lgelu.networks.outputs import IGNORED_LABEL, labels_of_predictions
from hf_lgelu.networks.sites import LEARNED_KINDS, SMOOTH_KINDS, find_sites
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions, ModelOptions
from lgelu_lab.benchmarks.images import AugmentationCallback
from lgelu_lab.benchmarks.metrics import row_scores
from lgelu_lab.benchmarks.mlp import register_learnable_swish
from lgelu_lab.benchmarks.table import check_benchmark
from lgelu_lab.studies.arguments import RunArguments, data_options, model_options
from lgelu_lab.studies.checkout import software_versions
from lgelu_lab.studies.clock import RunClock
from lgelu_lab.studies.experiments import experiment_name
from lgelu_lab.studies.folder import sole_writer, sweep
from lgelu_lab.studies.records import (
    FAILED_FILE,
    RECORD_FILE,
    RELU_FOLDER,
    EpochRecord,
    RunRecord,
    weight_digests,
    write_record,
)
from lgelu_lab.studies.relufication import RelufyCallback
from lgelu_lab.studies.settings import require_same_run, write_settings

Load = Callable[[DataOptions, ModelOptions], BenchmarkData]


class DivergedError(RuntimeError):
    """An evaluation gave what is no finite number."""


def run_benchmark(run: RunArguments, training: LambdaGELUTrainingArguments) -> RunRecord:
    """Train one model and write `output_dir`/record.json (schema: records.py).

    With `run.save_final_model`, the model goes to `output_dir` and, after hardening, its ReLU network
    to `output_dir`/relu. Resumes with `training.resume_from_checkpoint`.

    Raises:
        ValueError: an argument is wrong, the data are not there, or the run to resume had other settings or data.
        FileExistsError: `output_dir` holds a run, the checkpoints of an interrupted run, or a model.
        FolderBusyError: another process trains into `output_dir`.
        DivergedError: an evaluation gave a number that is not finite; what there was until then is in failed.json.
        RuntimeError: training ended without an evaluation, so that there is nothing to record.
    """
    training.output_dir = str(Path(training.output_dir).resolve())
    folder = Path(training.output_dir)
    with sole_writer(folder) if training.should_save else nullcontext():
        if training.resume_from_checkpoint is not None:
            given = training.resume_from_checkpoint  # a checkpoint, or the folder of a run
            training.resume_from_checkpoint = get_last_checkpoint(given) or given
        else:
            for name, what in ((RECORD_FILE, "a finished run"), ("config.json", "a model")):
                if (folder / name).exists():
                    raise FileExistsError(f"{folder} holds {what} ({name}); remove it, or give another output folder")
            if any(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
                raise FileExistsError(
                    f"{folder} holds the checkpoints of an interrupted run; go on with --resume_from_checkpoint "
                    f"{folder}, remove them, or give another output folder"
                )
        return train_and_record(run, training)


def train_and_record(
    run: RunArguments, training: LambdaGELUTrainingArguments, *, load: Load | None = None
) -> RunRecord:
    """What `run_benchmark` does in a folder that the caller holds; `load` replaces the benchmark's own."""
    register_learnable_swish()
    benchmark = check_benchmark(run.benchmark)
    _check(run, training)
    if training.hub_token is not None:  # goes where huggingface_hub looks: Trainer writes its arguments to files
        os.environ["HF_TOKEN"] = training.hub_token
        training.hub_token = None
    options = model_options(run)
    data = (load or benchmark.load)(data_options(run), options)
    _keep_settings(run, training, data)
    if training.device.type != "cpu" and training.dataloader_num_workers == 0:
        data = data.to(training.device)
        training.dataloader_pin_memory = False  # the rows are there already
    set_seed(training.seed)
    model = build_model(run, benchmark, data, options)
    initial_hardness = hardness_profile(model) if run.activation in GATES else {}
    trainer = _build_trainer(run, training, benchmark, data, model)
    try:
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    except DivergedError as error:
        if trainer.is_world_process_zero():
            write_record(_record(benchmark, run, trainer, data, initial_hardness, str(error)), training.output_dir)
        raise
    record = _with_change(_record(benchmark, run, trainer, data, initial_hardness), trainer)
    is_accuracy = record.metric == "accuracy"
    correct = round(record.last.score * len(data.eval)) if is_accuracy else None
    if is_accuracy and correct == data.eval.labels.bincount().max().item() and trainer.is_world_process_zero():
        print(
            f"{record.name}: {record.metric} {record.last.score:.4f} is that of calling every sample the most frequent "
            "class: the network has learned nothing. Look at learning_rate, num_train_epochs and max_train_samples",
            file=sys.stderr,
        )
    return _save(record, run, trainer, type(model), data.processor)


def build_model(run: RunArguments, benchmark: Benchmark, data: BenchmarkData, options: ModelOptions) -> PreTrainedModel:
    """The network of a run before its first step, from torch's global generator."""
    model = benchmark.build_model(run.activation, data, options)
    if run.channels_last:
        model.to(memory_format=torch.channels_last)
    if run.activation in GATES:
        initialize_hardness(model, run.init_mode, run.init_hardness, run.high_hardness, temperature=run.temperature)
    return model


def _build_trainer(
    run: RunArguments,
    training: LambdaGELUTrainingArguments,
    benchmark: Benchmark,
    data: BenchmarkData,
    model: PreTrainedModel,
) -> LambdaGELUTrainer:
    training.require_lambda_gelu = run.activation in GATES
    callbacks: list[TrainerCallback] = [RunClock(), _RunGuard(run)]
    callbacks += [AugmentationCallback(data.train)] if hasattr(data.train, "set_epoch") else []
    if run.relufication:  # LambdaGELUTrainer would call the options idle: the callback puts them back
        callbacks.insert(0, RelufyCallback(training.switch_fraction, training.hardening_strategy))
        training.switch_fraction = LambdaGELUTrainingArguments.switch_fraction
        training.hardening_strategy = LambdaGELUTrainingArguments.hardening_strategy
    options = benchmark.trainer_options(data)
    if benchmark.keeps_rows:
        options["compute_metrics"] = RowKeeper(benchmark.compute_metrics)
    trainer = LambdaGELUTrainer(
        model=model,
        args=training,
        train_dataset=data.train,
        eval_dataset=data.eval,
        **options,
        optimizer_cls_and_kwargs=timm_optimizer(run, training),
        callbacks=callbacks,
    )
    if training.disable_tqdm:
        trainer.remove_callback(PrinterCallback)  # transformers prints each log where it draws no progress bar
    return trainer


@torch.no_grad()
def _with_change(record: RunRecord, trainer: LambdaGELUTrainer) -> RunRecord:
    """The record with what ReLU changes of the saved weights: the largest logit change, and the predictions that stay.

    Each process compares all evaluation rows.
    """
    if record.saved.relu_score is None:
        return record
    model, change = trainer.model.eval(), OutputComparison()
    relu = TemporaryRelu(model, kinds=LEARNED_KINDS if trainer.args.require_lambda_gelu else SMOOTH_KINDS)
    size, collate = trainer.args.per_device_eval_batch_size, trainer.data_collator
    for batch in DataLoader(trainer.eval_dataset, size, collate_fn=collate):
        _, before, labels = trainer.prediction_step(model, batch, False)
        with relu.applied():
            _, after, _ = trainer.prediction_step(model, batch, False)
        before, after = (each[0] if isinstance(each, tuple) else each for each in (before, after))
        labels = labels_of_predictions(labels, model)
        change.add(before, after, labels != IGNORED_LABEL if labels.shape == before.shape[:-1] else None, kind="scores")
    found = {"relu_max_logit_change": change.largest_change, "relu_unchanged_predictions": change.agreement}
    epochs = (replace(epoch, **found) if epoch is record.saved else epoch for epoch in record.epochs)
    return replace(record, epochs=tuple(epochs))


def timm_optimizer(
    run: RunArguments, training: LambdaGELUTrainingArguments
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]] | None:
    """Trainer's `optimizer_cls_and_kwargs`; None where `--optim` decides. Each group's weight decay is Trainer's."""
    if run.timm_optimizer is None:
        return None
    from timm.optim import get_optimizer_info

    found = get_optimizer_info(run.timm_optimizer)  # its class: Trainer would take a partial of it for a factory
    return found.opt_class, {**(found.defaults or {}), "lr": training.learning_rate}


def _save(
    record: RunRecord, run: RunArguments, trainer: LambdaGELUTrainer, model_class: type[PreTrainedModel], processor: Any
) -> RunRecord:
    """The networks, and then the record that names their digests: killed in between, no record is there."""
    folder = Path(trainer.args.output_dir)
    if run.save_final_model:
        if trainer.is_world_process_zero():  # what speaks of other weights must not outlive them
            (folder / RECORD_FILE).unlink(missing_ok=True)
        trainer.save_model()
    if trainer.is_world_process_zero():
        if run.save_final_model:
            shutil.rmtree(folder / RELU_FOLDER, ignore_errors=True)  # of an earlier try
            if trainer.args.harden:
                # Not the trained module: under FSDP this process holds a part of it alone.
                model = from_pretrained(model_class, folder, use_safetensors=True)
                substitute_relu(model)
                save_checkpoint(model, folder / RELU_FOLDER)
                if processor is not None:
                    processor.save_pretrained(folder / RELU_FOLDER)
            record = replace(record, weights=weight_digests(folder))
        sweep(folder / RECORD_FILE)
        write_record(record, folder)
        (folder / FAILED_FILE).unlink(missing_ok=True)  # likewise
    trainer.accelerator.wait_for_everyone()
    return record


class RowKeeper:
    """`compute_metrics` that keeps the scores of each row: of an evaluation as it is, then with ReLU."""

    def __init__(self, compute_metrics: Callable[[EvalPrediction], dict[str, float]]) -> None:
        self.compute_metrics = compute_metrics
        self.kept: list[dict[str, list[float]]] = []

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        self.kept.append(row_scores(prediction))
        return self.compute_metrics(prediction)

    def last(self, both: bool) -> dict[str, list[float]]:
        """{"loss", "correct", "relu_loss", "relu_correct"} of the last evaluation, with ReLU where it judged `both`."""
        prefixes = ("", "relu_") if both else ("",)
        kept = self.kept[-len(prefixes) :]
        return {
            f"{prefix}{name}": rows for prefix, each in zip(prefixes, kept, strict=True) for name, rows in each.items()
        }


class _RunGuard(TrainerCallback):
    """Stops a run that would not be what its record says: hard gates or ReLU from the start, scores that are none."""

    def __init__(self, run: RunArguments) -> None:
        self.run = run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        by_epoch = args.eval_strategy == "epoch"
        last, unit = (state.num_train_epochs, "epochs") if by_epoch else (state.max_steps, "steps")
        if args.eval_delay > last:
            raise ValueError(
                f"with an eval_delay of {args.eval_delay:g} {unit} a run of {last} is never evaluated, and has nothing "
                "to record; give a smaller one"
            )
        if not (args.harden or self.run.relufication) or args.switch_fraction == 0:
            return
        by_step = args.hardening_strategy == "steps"
        total, unit = (state.max_steps, "steps") if by_step else (state.num_train_epochs, "epochs")
        if total >= 1 and hardening_progress(1, total, args.switch_fraction) is not None:
            happens = "ReLU would be put in at once and the smooth network never be trained"
            if args.harden:
                happens = "hardening would begin at once and λ never be learned"
            way_out = "" if by_step else ", take --hardening_strategy steps"
            raise ValueError(
                f"of {total} {unit} a switch_fraction of {args.switch_fraction:g} is less than one: {happens}. Train "
                f"at least {math.ceil(1 / args.switch_fraction)} {unit}{way_out}, or ask for it with --switch_fraction "
                "0"
            )

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        wrong = _not_finite(kwargs["metrics"])
        if wrong:
            raise DivergedError(
                f"training has diverged: at epoch {state.epoch:g} "
                + ", ".join(f"{name.removeprefix('eval_')} is {value}" for name, value in wrong.items())
                + ". Lower learning_rate, or lengthen warmup_steps"
            )


def _not_finite(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)}


def _check(run: RunArguments, training: LambdaGELUTrainingArguments) -> None:
    if training.harden and run.activation not in GATES:
        raise ValueError(f"only {', '.join(GATES)} harden, got activation {run.activation!r} with harden=True")
    if run.timm_optimizer is not None:
        require("timm", "timm")
    if training.n_gpu > 1:  # Trainer would train on them from one process, each with the whole batch
        raise ValueError(
            f"{training.n_gpu} GPUs are visible to one process, where the training batch would be {training.n_gpu} "
            f"times as large as is asked for. Use accelerate launch --num_processes {training.n_gpu}, or one GPU alone "
            "with CUDA_VISIBLE_DEVICES=0"
        )
    if training.dataloader_persistent_workers:
        raise ValueError(
            "dataloader_persistent_workers keeps the rows that its workers began with: every epoch would have the "
            "crops and flips of the first. Leave it out"
        )
    if training.eval_strategy == "no":
        raise ValueError("a run that is never evaluated has nothing to record; set eval_strategy to 'epoch' or 'steps'")
    if run.activation not in ACT2FN:
        names = sorted(name for name in ACT2FN if name.isidentifier())
        raise ValueError(f"unknown activation {run.activation!r}; accepted: {', '.join(names)}")


def _keep_settings(run: RunArguments, training: LambdaGELUTrainingArguments, data: BenchmarkData) -> None:
    """Compare a run that goes on with what it was begun with, and write that down where there will be checkpoints."""
    settings = run_config(run, training, training.world_size)
    if training.resume_from_checkpoint is not None:
        checkpoint = Path(training.resume_from_checkpoint)
        require_same_run(checkpoint, settings, data.origin)
    if training.should_save and training.save_strategy != "no":
        write_settings(Path(training.output_dir), settings, data.origin)


def run_name(run: RunArguments, training: LambdaGELUTrainingArguments) -> str:
    """A short name that tells a run from its neighbours, e.g. "mlp-adult/lambda_gelu-uniform-hardened-seed0"."""
    configuration = {
        "activation": run.activation, "harden": training.harden, "relufication": run.relufication,
    }  # fmt: skip
    if run.activation in GATES:
        configuration["init_mode"] = run.init_mode
    return experiment_name(run.benchmark, configuration, training.seed)


def _record(
    benchmark: Benchmark,
    run: RunArguments,
    trainer: LambdaGELUTrainer,
    data: BenchmarkData,
    initial_hardness: dict[str, float],
    failure: str | None = None,
) -> RunRecord:
    processes = trainer.accelerator.num_processes
    clock = next(each for each in trainer.callback_handler.callbacks if isinstance(each, RunClock))
    log = trainer.state.log_history
    evaluations = [entry for entry in log if f"eval_{benchmark.metric}" in entry and not _not_finite(entry)]
    if not evaluations and failure is None:
        raise RuntimeError(
            f"training ended after {trainer.state.global_step} steps without an evaluation, so there is nothing to "
            "record; look at num_train_epochs, max_steps, eval_strategy, eval_steps and eval_delay"
        )
    keeper = trainer.compute_metrics
    keeps_rows = isinstance(keeper, RowKeeper) and keeper.kept and evaluations
    config, state = run_config(run, trainer.args, processes), trainer.state
    if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
        best = [entry["epoch"] for entry in state.log_history if entry.get("step") == state.best_global_step]
        config["saved_epoch"] = best[-1]
    return RunRecord(
        name=trainer.args.run_name or run_name(run, trainer.args),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(clock.seconds, 3),
        config=config,
        data={
            "train_samples": len(data.train),
            "eval_samples": len(data.eval),
            "eval_split": data.eval_split,
            "classes": len(data.label_names) or None,
            **asdict(data.origin),
        },
        model={
            "class": type(trainer.model).__name__,
            "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
            "activation_sites": len(find_sites(trainer.model)),
        },
        metric=benchmark.metric,
        greater_is_better=benchmark.greater_is_better,
        initial_hardness=initial_hardness,
        epochs=tuple(_epoch(entry, benchmark.metric, initial_hardness) for entry in evaluations),
        versions=software_versions(),
        hardware=hardware(processes),
        failure=failure,
        rows=keeper.last("eval_relu_loss" in evaluations[-1]) if keeps_rows else {},
    )


def run_config(run: RunArguments, training: LambdaGELUTrainingArguments, processes: int = 1) -> dict[str, Any]:
    """The `config` of a run's record: everything that decides what comes out, apart from the data."""
    of_run = (
        *("benchmark", "activation", "init_mode", "init_hardness", "high_hardness", "temperature"),
        "relufication",
    )
    of_training = (
        *("hardness_lr_multiplier", "harden", *(option.name for option in fields(HardeningConfig))),
        *("seed", "optim", "optim_args", "learning_rate"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs"),
        *("warmup_steps", "max_grad_norm", "num_train_epochs", "max_steps", "gradient_accumulation_steps"),
        *("label_smoothing_factor", "load_best_model_at_end", "dataloader_drop_last"),
        *("data_seed", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start"),
        *("train_sampling_strategy", "neftune_noise_alpha"),
    )
    values = {name: getattr(run, name) for name in of_run} | {name: getattr(training, name) for name in of_training}
    # accelerate's configuration file may ask for it as well
    values |= {name: training.mixed_precision == name for name in ("bf16", "fp16")}
    values["train_batch_size"] = training.per_device_train_batch_size * training.gradient_accumulation_steps * processes
    values |= {name: getattr(run, name) for name in ("max_train_samples", "max_eval_samples", "channels_last")}
    values |= asdict(model_options(run))
    if run.timm_optimizer is not None:
        values |= {"optim": run.timm_optimizer, "adam_beta1": None, "adam_beta2": None, "adam_epsilon": None}
    if training.harden:
        tolerance = {} if training.tolerance is None else {"tolerance": training.tolerance}
        gate = {"gate": run.activation} if run.activation in GATES else {}
        values["target_hardness"] = training.target_hardness or hardness_for_tolerance(**tolerance, **gate)
    return {name: getattr(value, "value", value) for name, value in values.items()}


def _epoch(entry: dict[str, Any], metric: str, sites: Iterable[str]) -> EpochRecord:
    return EpochRecord(
        epoch=entry["epoch"],
        score=entry[f"eval_{metric}"],
        loss=entry.get("eval_loss"),
        relu_score=entry.get(f"eval_relu_{metric}"),
        relu_loss=entry.get("eval_relu_loss"),
        hardness={site: entry[f"hardness/{site}"] for site in sites if f"hardness/{site}" in entry},
    )
