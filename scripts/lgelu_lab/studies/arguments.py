"""The command line of one run: what is trained, beside how (TrainingArguments)."""

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import HfArgumentParser

from hf_lgelu.activation.hardness import DEFAULT_TEMPERATURE, INIT_MODES
from hf_lgelu.models.registry import ACTIVATION_NAME
from hf_lgelu.training.arguments import LambdaGELUTrainingArguments
from lgelu_lab.benchmarks.options import DataOptions, ModelOptions
from lgelu_lab.benchmarks.table import BENCHMARKS, Benchmark

# What every run does unless told otherwise: one evaluation and one log a epoch, no checkpoints.
_RUN_DEFAULTS: dict[str, Any] = {
    "eval_strategy": "epoch",
    "logging_strategy": "epoch",
    "save_strategy": "no",
    "report_to": "none",
    "dataloader_pin_memory": torch.accelerator.is_available(),
}


@dataclass
class RunArguments:
    """One run: a benchmark, an activation and its initial hardness, and the data."""

    benchmark: str = field(metadata={"help": f"What to train: {', '.join(BENCHMARKS)}.", "choices": list(BENCHMARKS)})
    activation: str = field(
        default=ACTIVATION_NAME,
        metadata={"help": "gelu, relu, lambda_gelu or any other activation name of transformers."},
    )
    init_mode: str = field(
        default="uniform",
        metadata={"help": "Initial λ over depth: uniform, increasing or decreasing.", "choices": list(INIT_MODES)},
    )
    init_hardness: float | None = field(
        default=None, metadata={"help": "λ₀, the low end of the init mode. Default: the benchmark's (1.0067)."}
    )
    high_hardness: float = field(
        default=2.0, metadata={"help": "The high end of the init modes increasing and decreasing."}
    )
    temperature: float = field(default=DEFAULT_TEMPERATURE, metadata={"help": "t of λ(s) = 1 + softplus(s/t)."})
    data_dir: str | None = field(
        default=None,
        metadata={"help": "Folder with local copies of the data sets; default: LGELU_DATA_DIR, else the Hub."},
    )
    pretrained: str | None = field(
        default=None,
        metadata={"help": "Folder or Hub id of a checkpoint to fine-tune, for the benchmarks that take one."},
    )
    image_size: int | None = field(default=None, metadata={"help": "Resize images to so many pixels a side."})
    patch_size: int | None = field(default=None, metadata={"help": "Pixels a side of a vision transformer's patch."})
    num_layers: int | None = field(default=None, metadata={"help": "Blocks of a language model from scratch."})
    width: int | None = field(default=None, metadata={"help": "Units of a language model's residual stream."})
    num_heads: int | None = field(default=None, metadata={"help": "Attention heads of a language model."})
    context_length: int | None = field(default=None, metadata={"help": "Tokens in a row of text."})
    vocabulary_size: int | None = field(default=None, metadata={"help": "Tokens of a tokenizer trained on the corpus."})
    channels_last: bool = field(
        default=False, metadata={"help": "Keep convolution weights in channels_last order, which GPUs prefer in bf16."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on at most so many rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on at most so many rows."})
    validation_fraction: float = field(
        default=0.0,
        metadata={
            "help": "Share of the training split to hold out for selection. 0 evaluates on the test split, as the "
            "paper seems to."
        },
    )
    save_final_model: bool = field(
        default=True,
        metadata={
            "help": "Save the trained model in output_dir and, if hardened, its ReLU network in output_dir/relu."
        },
    )


def parse_command_line(arguments: Sequence[str] | None = None) -> tuple[RunArguments, LambdaGELUTrainingArguments]:
    """Parse one run's command line; what it leaves open comes from the benchmark's recipe."""
    parser = HfArgumentParser((RunArguments, LambdaGELUTrainingArguments))
    named, _ = HfArgumentParser(_BenchmarkOnly).parse_known_args(arguments)
    if named.benchmark in BENCHMARKS:
        parser.set_defaults(**recipe(BENCHMARKS[named.benchmark], pretrained=named.pretrained is not None))
    run, training = parser.parse_args_into_dataclasses(arguments)
    return _completed(run), training


def parse_mapping(arguments: Mapping[str, Any]) -> tuple[RunArguments, LambdaGELUTrainingArguments]:
    """As `parse_command_line`, from {argument: value}."""
    benchmark = check_benchmark(arguments.get("benchmark"))
    parser = HfArgumentParser((RunArguments, LambdaGELUTrainingArguments))
    chosen = recipe(benchmark, pretrained=arguments.get("pretrained") is not None)
    run, training = parser.parse_dict({**chosen, **arguments})
    return _completed(run), training


def check_argument_names(names: Iterable[str]) -> None:
    """Raise ValueError if one of `names` is no argument of scripts/train.py, with the one that it resembles."""
    known = [entry.name for kind in (RunArguments, LambdaGELUTrainingArguments) for entry in fields(kind) if entry.init]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            meant = f"; did you mean {', '.join(close)}?" if close else "; scripts/train.py --help lists them"
            raise ValueError(f"scripts/train.py has no argument {name!r}{meant}")


def recipe(benchmark: Benchmark, *, pretrained: bool = False) -> dict[str, Any]:
    """The benchmark's training arguments, its batch divided over the processes of this launch."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = {**_RUN_DEFAULTS, **benchmark.defaults, **(benchmark.pretrained_defaults if pretrained else {})}
    batch_size = chosen["per_device_train_batch_size"]
    if batch_size % processes:
        raise ValueError(
            f"the training batch of {batch_size} rows does not divide over {processes} processes; give "
            "--per_device_train_batch_size"
        )
    return {
        **chosen,
        "per_device_train_batch_size": batch_size // processes,
        "metric_for_best_model": benchmark.metric,
        "greater_is_better": benchmark.greater_is_better,
    }


def model_options(run: RunArguments) -> ModelOptions:
    """The model options of a run, completed by its benchmark; ValueError for one that it does not take."""
    given = {option.name: getattr(run, option.name) for option in fields(ModelOptions)}
    return check_benchmark(run.benchmark).model_options(given)


def data_options(run: RunArguments) -> DataOptions:
    """The data options of a run."""
    return DataOptions(
        data_dir=run.data_dir,
        max_train_samples=run.max_train_samples,
        max_eval_samples=run.max_eval_samples,
        validation_fraction=run.validation_fraction,
    )


def check_benchmark(name: str | None) -> Benchmark:
    """Return the row of BENCHMARKS, or raise naming the accepted ones."""
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; accepted: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


@dataclass
class _BenchmarkOnly:
    benchmark: str | None = None
    pretrained: str | None = None


def _completed(run: RunArguments) -> RunArguments:
    if run.init_hardness is None:
        run.init_hardness = check_benchmark(run.benchmark).init_hardness
    return run
