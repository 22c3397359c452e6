"""What each command of `hf-lgelu` takes: one dataclass a command, and the tables EXPORT_FORMS and COMMANDS.

A new command is a dataclass, a row, and a module with a function, both of its name; help shows the dataclass's
docstring and examples. An option without a default is required; of these the command's words are given without a name.
Nothing here imports torch.
"""

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from hf_lgelu.refit.config import EFFORTS, ConversionConfig

_DATA = "a data set's Hub id, a folder of data files of one type or of images, or a CSV, JSON, Parquet or text file"
_AMOUNT = "8,192 rows of features, 1,024 images, or sequences of together 32,768 tokens"


EXPORT_FORMS = {
    "relu": "ReLU in the place of hard gates",
    "gelu": "GELU, with λ absorbed by the weights, exactly",
    "onnx": "the model as it is, whatever its gates, for onnxruntime",
    "int8": "the same and its int8 file, judged on inputs of --data that gave no ranges",
}
"""What `hf-lgelu export --to` writes. The first two are again checkpoints, of one with λ-GELU, and have a card."""

_OF_A_CARD = ("push_to_hub", "license", "max_eval_samples")
_OF_INT8 = ("data", "data_split", "data_config", "max_samples", "original", "operations", "allow_worse")
_OF_A_FORM = {
    "allow_soft": ("relu",),
    "opset": ("onnx",),
    "label_column": ("relu", "gelu", "int8"),
    "evaluation": ("relu", "gelu", "onnx"),
    **dict.fromkeys(_OF_A_CARD, ("relu", "gelu")),
    **dict.fromkeys(_OF_INT8, ("int8",)),
}

GROUPS = ("input", "method", "output", "Hub")  # the groups of a command's options, in the order of its help


def _option(group: str, help: str, default: Any = dataclasses.MISSING, **settings: Any) -> Any:
    """An option. Of `settings`, `choices` are the accepted words, and `is_word` says that the option is given without
    its name. `reads` is "model" or "dataset" if its value names a folder, a file or a Hub id of that kind. `argument`
    is the name in Python's messages, if that is another."""
    return field(default=default, metadata={"group": group, "help": help.replace("%", "%%"), **settings})


_input, _method, _output, _hub = (partial(_option, group) for group in GROUPS)


_onnx_dir = partial(_output, "Folder in which the ONNX files of --int8 are kept. Default: not kept.", None)


def _of_config(name: str, **settings: Any) -> Any:
    """An option of ConversionConfig, with the words of its docstring."""
    words = re.search(
        rf"^    {name}: (.*?)(?=^    \S|\n\n)", inspect.getdoc(ConversionConfig) or "", re.DOTALL | re.MULTILINE
    )
    help = re.sub(r"`([^`]*)`", r"\1", " ".join(words[1].split())) if words else ""
    return _method(help, getattr(ConversionConfig, name), **settings)


def named(text: str | None) -> list[str] | None:
    """Names with commas between, as a list; None of None."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


@dataclass(kw_only=True)
class Arguments:
    """What the arguments of all commands have in common."""

    command: ClassVar[str]
    examples: ClassVar[tuple[str, str]]

    @property
    def progress(self) -> bool:
        """Whether progress is shown."""
        return sys.stderr.isatty() and not getattr(self, "disable_tqdm", False)

    def __post_init__(self) -> None:
        for name in ("max_samples", "max_eval_samples", "batch_size"):
            _require(self, name, getattr(self, name, None) is None or getattr(self, name) >= 1, "1 or more")
        if (folder := getattr(self, "output_dir", None)) is not None:
            vars(self)["output_dir"] = os.path.expanduser(folder)  # a shell leaves ~ as it is in --output_dir=~/relu
        if (folder := getattr(self, "onnx_dir", None)) is not None:
            _require(self, "onnx_dir", vars(self)["int8"], "left out without --int8")
            _require(self, "onnx_dir", not any(Path(folder).glob("*.onnx")), "a folder without ONNX files")


@dataclass(kw_only=True)
class CheckpointArguments(Arguments):
    """The checkpoint, a word without a name."""

    model: str = _input("Folder or Hub id of the checkpoint.", is_word=True, reads="model")
    trust_remote_code: bool = _input(
        "Run code that the checkpoint brings. Default: not run.",
        False,
        argument="trust_remote_code=True",  # as transformers says it
    )

    @property
    def reading(self) -> dict[str, bool]:
        """How `read_checkpoint` is to read it."""
        return {"progress": self.progress, "trust_remote_code": self.trust_remote_code}


@dataclass(kw_only=True)
class RowArguments(CheckpointArguments):
    """How rows of a data set become inputs of a checkpoint."""

    column: str | None = _input("Column of texts, images or features. Default: the only one there is.", None)
    pair_column: str | None = _input(
        "Column of the second texts of a network of pairs (a cross-encoder, inference, paraphrase); the first are "
        "those of --column. Default: every text stands alone.",
        None,
    )
    label_column: str | None = _input(
        "Column of a classifier's classes, for scores alone. Default: label or labels, if there is one.", None
    )
    sequence_length: int | None = _input("Tokens of a sequence. Default: what the model takes, at most 1,024.", None)
    seed: int = _input("Random seed of the choice of inputs. Default: 0.", 0)
    disable_tqdm: bool = _output("No progress. Default: lines and bars where stderr is a terminal.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "seed", 0 <= self.seed < 2**32, "from 0 to below 2**32")
        _require(self, "sequence_length", self.sequence_length is None or self.sequence_length >= 2, "2 or more")


@dataclass(kw_only=True)
class InputArguments(RowArguments):
    """The inputs on which networks are compared, and how a data set becomes inputs."""

    evaluation: str | None = _input(
        f"Inputs on which networks are compared, with scores where there are labels: {_DATA}, or none. Default: the "
        "validation or test split of --data (convert), else random inputs.",
        None,
        reads="dataset",
        argument="evaluation_data",
    )
    evaluation_split: str | None = _input("Which split. Default: validation or test, else its only one.", None)
    evaluation_config: str | None = _input("Which of its configurations. Default: its only one.", None)
    max_eval_samples: int | None = _input(f"At most so many of its inputs. Default: {_AMOUNT}.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        unread = [f"--{name}" for name in self._of_a_set() if getattr(self, name) is not None]
        if unread:
            raise ValueError(f"nothing reads {' and '.join(unread)} without the data set that it is for")

    def _of_a_set(self) -> Sequence[str]:
        """Options of data sets that are not given."""
        options = ("evaluation_split", "evaluation_config", "max_eval_samples", "column", "pair_column", "label_column")
        return () if self.evaluation not in (None, "none") else (*options, "sequence_length")


@dataclass(kw_only=True)
class OutputArguments(InputArguments):
    """The folder that a command writes, and where it goes."""

    output_dir: str = _output("Folder to write; it is complete or not there.")
    overwrite: bool = _output("Replace an output folder that holds a model. Default: refused.", False)
    license: str | None = _output(
        "Licence on the card, as the Hub spells it. Default: that of the original's card.", None
    )
    push_to_hub: str | None = _hub(
        "Push the folder with its card to this Hub repository, such as user/model. Default: nothing is pushed.", None
    )
    private: bool = _hub("Make a new Hub repository a private one. Default: as your account has it.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.private and self.push_to_hub is None:
            raise ValueError("--private needs --push_to_hub, which says where to push")


@dataclass(kw_only=True)
class ConvertArguments(OutputArguments):
    """A trained smooth network (GELU, SiLU, Mish, λ-GELU) to ReLU without training, on unlabelled inputs."""

    command = "convert"
    examples = (
        "hf-lgelu convert runs/tabular --data rows.csv --output_dir out/relu",
        "hf-lgelu convert you/your-gpt2 --data you/texts --max_samples 64 --output_dir out/relu",
    )

    data: str | None = _input(
        f"Unlabelled inputs like those the model meets: {_DATA}. Default: text that a language model samples itself, "
        "8,192 tokens; other models need inputs.",
        None,
        reads="dataset",
    )
    data_split: str = _input("Which split of it. Default: train.", "train")
    data_config: str | None = _input("Which of its configurations. Default: its only one.", None)
    max_samples: int | None = _input(
        f"At most so many of its rows, sequences or images. Default: {_AMOUNT}, but at least 32.", None
    )
    target: str = _of_config("target")
    effort: str | None = _of_config("effort", choices=EFFORTS)
    width: float = _of_config("width")
    live: float | None = _of_config("live")
    tolerance: float | None = _of_config("tolerance")
    batch_size: int | None = _of_config("batch_size")
    max_seconds: float | None = _of_config("max_seconds")
    distill_steps: int | None = _of_config("distill_steps")
    bf16: bool = _of_config("bf16")
    keep: str = _method(
        "Gates that stay smooth: names with commas between, or how many of the most costly. Default: none.", "0"
    )
    outputs: str | None = _method(
        "Names of the outputs that count, with commas between; the first is compared. Default: those that the model's "
        "task reads (logits, boxes, embeddings).",
        None,
    )
    max_kl: float = _of_config("max_kl")
    strict: bool = _of_config("strict")
    compare: bool = _output(
        "At the end print both networks beside each other: score, distance, milliseconds, megabytes. Default: not "
        "printed; `hf-lgelu compare` prints it later.",
        False,
    )
    int8: bool = _output("With --compare: both networks in int8 as well, by ONNX. Default: in float32.", False)
    onnx_dir: str | None = _onnx_dir()
    resume: bool = _output(
        "Keep finished layers in a hidden folder next to --output_dir, and go on from there after an interruption. A "
        "killed process also leaves a folder .NAME-….hf_lgelu there: delete it. Default: nothing is kept.",
        False,
        argument="checkpoint_dir",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "keep", bool(named(self.keep)), "a number, or names with commas between")
        _require(self, "int8", self.compare or not self.int8, "left out without --compare")
        self.config()  # raises where options do not go together

    def config(self, checkpoint_dir: Path | None = None, max_samples: int | None = None) -> ConversionConfig:
        """The same as `convert_to_relu` takes it; the command has chosen the samples itself, `max_samples` of more."""
        own = {field.name: getattr(self, field.name) for field in fields(ConversionConfig) if hasattr(self, field.name)}
        keep = int(self.keep) if self.keep.isdecimal() else named(self.keep) or 0
        own |= {
            "keep": keep,
            "outputs": named(self.outputs),
            "max_samples": max_samples,
            "checkpoint_dir": checkpoint_dir,
        }
        return ConversionConfig(**own)

    def _of_a_set(self) -> Sequence[str]:
        if self.data is None:
            return (*super()._of_a_set(), "data_config")
        # Left out, --evaluation may be another split of --data.
        return ("evaluation_split", "evaluation_config", "max_eval_samples") if self.evaluation == "none" else ()


@dataclass(kw_only=True)
class ExportArguments(OutputArguments):
    """A hardened λ-GELU checkpoint to a plain ReLU or GELU one; any checkpoint to ONNX, or to judged int8."""

    command = "export"
    examples = (
        "hf-lgelu export runs/tabular --output_dir out/relu --evaluation test.csv",
        "hf-lgelu export out/relu --to int8 --data texts.txt --output_dir out/int8 --original you/your-bert",
    )

    to: str = _method(
        f"{'; '.join(map(': '.join, EXPORT_FORMS.items()))}. Default: relu.", "relu", choices=tuple(EXPORT_FORMS)
    )
    data: str | None = _input(
        f"For --to int8, which needs it: inputs like those the model meets, {_DATA}. Default: none, for the other forms.",
        None,
        reads="dataset",
    )
    data_split: str | None = _input("Which split of it. Default: validation or test, else its only one.", None)
    data_config: str | None = _input("Which of its configurations. Default: its only one.", None)
    max_samples: int | None = _input(f"At most so many of its inputs. Default: {_AMOUNT}.", None)
    original: str | None = _input(
        "With --to int8, the checkpoint before its conversion: int8 must take no more from this one. Default: the "
        "relative error of int8 is judged alone.",
        None,
        reads="model",
    )
    operations: str | None = _method(
        "What int8 computes in integers: all, or of a network's layers alone the products. Default: layers with "
        "attention, else all.",
        None,
        choices=("all", "layers"),
    )
    allow_worse: bool = _method("Keep an int8 file that is not good. Default: refused.", False)
    allow_soft: bool = _method("Put ReLU in even where gates are soft. Default: refused.", False)
    opset: int | None = _method("Version of ONNX's operations, 11 to 25. Default: 20.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [f"--{name}" for name, forms in _OF_A_FORM.items() if getattr(self, name) and self.to not in forms]
        if given:
            raise ValueError(f"{' and '.join(given)}: --to {self.to} does not take that; leave it out")
        if self.to == "int8" and self.data is None:
            raise ValueError("--to int8 needs --data: inputs like those the model meets, without labels")

    def _of_a_set(self) -> Sequence[str]:
        return super()._of_a_set() if self.data is None else ("evaluation_split", "evaluation_config")


@dataclass(kw_only=True)
class CheckArguments(InputArguments):
    """Is a checkpoint piecewise linear, what would ReLU cost, what stands in the way; nothing is written."""

    command = "check"
    examples = ("hf-lgelu check you/your-bert", "hf-lgelu check runs/tabular --evaluation test.csv")

    outputs: str | None = _method(
        "Outputs that count, with commas between. Default: those that the model's task reads.", None
    )


@dataclass(kw_only=True)
class CompareArguments(RowArguments):
    """Two checkpoints beside each other: score, distance, milliseconds, megabytes; nothing is written."""

    command = "compare"
    examples = (
        "hf-lgelu compare runs/tabular out/relu --data test.csv",
        "hf-lgelu compare you/your-bert out/relu --data texts.txt --int8",
    )

    converted: str = _input("Folder or Hub id of the other network.", is_word=True, reads="model")
    data: str = _input(f"Inputs of both networks, best not those of the conversion: {_DATA}.", reads="dataset")
    data_split: str | None = _input("Which split. Default: validation or test, else its only one.", None)
    data_config: str | None = _input("Which of its configurations. Default: its only one.", None)
    max_samples: int | None = _input(f"At most so many of its inputs. Default: {_AMOUNT}.", None)
    int8: bool = _method("Both networks in int8 as well, by ONNX. Default: in float32, by torch.", False)
    onnx_dir: str | None = _onnx_dir()


@dataclass(kw_only=True)
class ProfileArguments(CheckpointArguments):
    """The hardness λ of every gate of a λ-GELU checkpoint."""

    command = "profile"
    examples = ("hf-lgelu profile runs/tabular", "hf-lgelu profile you/your-soft-bert")


@dataclass(kw_only=True)
class DemoArguments(Arguments):
    """The whole road in half a minute: train on digits that are here, convert, save, reload, measure."""

    command = "demo"
    examples = ("hf-lgelu demo", "hf-lgelu demo --output_dir out/digits")

    output_dir: str = _output("Folder to write. Default: hf-lgelu-demo.", "hf-lgelu-demo")
    overwrite: bool = _output("Replace an output folder that holds a model. Default: refused.", False)


def _require(arguments: Any, name: str, is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(f"--{name} must be {what}, got {getattr(arguments, name)!r}")


COMMANDS: dict[str, type[Arguments]] = {
    kind.command: kind
    for kind in (ConvertArguments, ExportArguments, CompareArguments, DemoArguments, CheckArguments, ProfileArguments)
}

OPTIONS: dict[str, str] = {
    argument: f"--{entry.name}"
    for kind in COMMANDS.values()
    for entry in fields(kind)
    if "is_word" not in entry.metadata
    for argument in (entry.name, entry.metadata.get("argument", entry.name))
}
"""{argument in a message of Python: option of the command}."""
