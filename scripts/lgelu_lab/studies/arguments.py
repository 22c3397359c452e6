"""The command line of one run: what is trained, beside how (TrainingArguments)."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

import torch
from transformers import HfArgumentParser

from hf_lgelu import LambdaGELUTrainingArguments
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import DataOptions, ModelOptions
from lgelu_lab.benchmarks.table import BENCHMARKS, check_benchmark
from lgelu_lab.studies.experiments import INIT_MODES, PAPER_TEMPERATURE

RECIPES = ("paper", "cpu")

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
        default="lambda_gelu",
        metadata={"help": "gelu, relu, lambda_gelu, lambda_silu or any other activation name of transformers."},
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
    temperature: float = field(default=PAPER_TEMPERATURE, metadata={"help": "t of λ(s) = 1 + softplus(s/t)."})
    relufication: bool = field(
        default=False,
        metadata={
            "help": "The rival of hardening: train a smooth network for the switch fraction, put ReLU in, train on."
        },
    )
    recipe: str = field(
        default="paper",
        metadata={
            "help": "What is not given: as the paper has it (paper), or ours for whole data on CPU cores (cpu).",
            "choices": list(RECIPES),
        },
    )
    timm_optimizer: str | None = field(
        default=None,
        metadata={"help": "timm's name of an optimizer, such as muon or nmuon, in place of --optim."},
    )
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
    save_final_model: bool = field(
        default=True,
        metadata={
            "help": "Save the trained model in output_dir and, if hardened, its ReLU network in output_dir/relu."
        },
    )


class OneLineParser(HfArgumentParser):
    """HfArgumentParser that answers a wrong call with one line and status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists the options\n")

    def parse(self, arguments: Sequence[str] | None = None) -> tuple[Any, ...]:
        """The dataclasses of a command line."""
        try:
            return self.parse_args_into_dataclasses(arguments)
        except (ValueError, TypeError) as error:  # of a dataclass that checks its values, or an unknown option
            self.error(str(error))


def exit_status(work: Callable[[], object]) -> int:
    """0 after a script's work; 1, with the reason on stderr, where the work is refused or cannot be done."""
    try:
        work()
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def parse_command_line(arguments: Sequence[str] | None = None) -> tuple[RunArguments, LambdaGELUTrainingArguments]:
    """Parse one run's command line; what it leaves open comes from the benchmark's recipe."""
    usage = "%(prog)s --benchmark NAME --output_dir FOLDER [options]"
    parser = OneLineParser((RunArguments, LambdaGELUTrainingArguments), allow_abbrev=False, usage=usage)
    parser.set_defaults(**_RUN_DEFAULTS)
    # This one must leave --help to the parser that knows all options.
    first = HfArgumentParser(_Recipe, add_help=False, allow_abbrev=False)
    named, _ = first.parse_known_args(arguments)
    if named.benchmark in BENCHMARKS:
        try:
            chosen = recipe(BENCHMARKS[named.benchmark], named.recipe, named.pretrained is not None, optim=named.optim)
            parser.set_defaults(**chosen)
        except ValueError as error:
            parser.error(str(error))
    run, training = parser.parse(arguments)
    return _completed(run), training


def parse_mapping(arguments: Mapping[str, Any]) -> tuple[RunArguments, LambdaGELUTrainingArguments]:
    """As `parse_command_line`, from {argument: value}."""
    benchmark = check_benchmark(arguments.get("benchmark"))
    parser = HfArgumentParser((RunArguments, LambdaGELUTrainingArguments))
    is_pretrained = arguments.get("pretrained") is not None
    chosen = recipe(benchmark, arguments.get("recipe", "paper"), is_pretrained, optim=arguments.get("optim"))
    run, training = parser.parse_dict({**chosen, **arguments})
    return _completed(run), training


def check_argument_values(values: Mapping[str, Any]) -> None:
    """Raise ValueError for what is no argument of scripts/train.py, and where text stands for a number or a switch.

    transformers takes any text for true.
    """
    kinds = {
        name: kind for of in (RunArguments, LambdaGELUTrainingArguments) for name, kind in get_type_hints(of).items()
    }
    unknown = sorted(values.keys() - kinds.keys())
    if unknown:
        raise ValueError(f"scripts/train.py has no argument {', '.join(unknown)}; its --help lists them")
    for name, value in values.items():
        accepted = get_args(kinds[name]) or (kinds[name],)
        plain = tuple(kind for kind in accepted if isinstance(kind, type))
        if bool in plain and isinstance(value, str | int | float) and not isinstance(value, plain):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        if isinstance(value, str) and set(accepted) <= {int, float, NoneType}:
            raise ValueError(f"{name} must be a number as JSON has it (0.5, 1e-3), got {value!r}")


def recipe(
    benchmark: Benchmark, name: str = "paper", pretrained: bool = False, *, optim: str | None = None
) -> dict[str, Any]:
    """The benchmark's arguments of that recipe, its batch divided over the processes of this launch.

    An optimizer of transformers that was asked for, `optim`, takes the place of the recipe's timm optimizer.

    Raises ValueError for a recipe that the benchmark does not have, or a batch that does not divide.
    """
    if name not in RECIPES or (name == "cpu" and not benchmark.cpu_defaults):
        having = [row.name for row in BENCHMARKS.values() if row.cpu_defaults]
        raise ValueError(
            f"{benchmark.name} has no recipe {name!r}; every benchmark has 'paper', and {', '.join(having)} have 'cpu'"
        )
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    chosen = {**_RUN_DEFAULTS, **benchmark.defaults, **(benchmark.pretrained_defaults if pretrained else {})}
    chosen |= benchmark.cpu_defaults if name == "cpu" else {}
    if optim is not None:
        chosen.pop("timm_optimizer", None)
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
    return DataOptions(data_dir=run.data_dir, **{name: getattr(run, name) for name in _ROWS})


def recorded_options(config: Mapping[str, Any], data_dir: str | None = None) -> tuple[DataOptions, ModelOptions]:
    """The options that a run was made with, from the config of its record: they give the same rows again."""
    if config.get("validation_fraction"):
        raise ValueError("the run held out a part of its training split, which the laboratory no longer does")
    rows = {name: config[name] for name in _ROWS if config.get(name) is not None}
    return DataOptions(data_dir=data_dir, **rows), ModelOptions(
        **{option.name: config.get(option.name) for option in fields(ModelOptions)}
    )


_ROWS = ("max_train_samples", "max_eval_samples")


@dataclass
class _Recipe:
    benchmark: str | None = None
    recipe: str = "paper"
    pretrained: str | None = None
    optim: str | None = None


def _completed(run: RunArguments) -> RunArguments:
    if run.init_hardness is None:
        run.init_hardness = check_benchmark(run.benchmark).init_hardness
    return run
