"""The options of each command of `hf-lgelu`, in one dataclass a command, and the tables EXPORT_FORMS and COMMANDS.

A new command needs a dataclass, a row in COMMANDS, and a module with a function, both of the command's name. Help shows
the dataclass's docstring and examples. An option without a default is required. Nothing here imports torch.
"""

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

from hf_lgelu.files import is_onnx
from hf_lgelu.refit.config import EFFORTS, ConversionConfig

_DATA = "a data set's Hub id, a folder of data files of one type or of images, or a CSV, JSON, Parquet or text file"
_AMOUNT = "8,192 rows of features, 1,024 images, or sequences with 32,768 tokens together"


EXPORT_FORMS = {
    "relu": "ReLU instead of hard gates",
    "gelu": "GELU of the same function; λ goes into the maps around each gate",
    "onnx": "the model with its own gates, for onnxruntime",
    "int8": "the ONNX file and an int8 file, which is judged on a part of --data",
}
"""The forms that `hf-lgelu export --to` writes. The first two are checkpoints with a card, of models with λ-GELU."""

_OF_EVALUATION = ("evaluation", "evaluation_split", "evaluation_config")
_OF_A_CARD = ("push_to_hub", "license", "max_eval_samples")
_OF_INT8 = ("data", "data_split", "data_config", "max_samples", "original", "operations", "allow_worse")
_OF_A_FORM = {
    "allow_soft": ("relu",),
    "opset": ("onnx",),
    "label_column": ("relu", "gelu", "int8"),
    **dict.fromkeys(_OF_EVALUATION, ("relu", "gelu", "onnx")),
    **dict.fromkeys(_OF_A_CARD, ("relu", "gelu")),
    **dict.fromkeys(_OF_INT8, ("int8",)),
}

_OF_A_SET = ("column", "pair_column", "label_column", "sequence_length", *_OF_EVALUATION[1:], "max_eval_samples")
_NEEDS = {
    "private": ("push_to_hub",),
    "data_config": ("data",),
    **dict.fromkeys(_OF_A_SET, ("evaluation", "data")),
}
"""{option: the options of which it needs one}."""

GROUPS = ("most used", "input", "method", "output", "Hub")


def _option(group: str, help: str, default: Any = dataclasses.MISSING, **settings: Any) -> Any:
    """An option. `choices` are the accepted words. `is_word` says that the option is given without its name. `reads` is
    "model" or "dataset" if the value names a folder, file or Hub id of this kind.
    """
    return field(default=default, metadata={"group": group, "help": help.replace("%", "%%"), **settings})


_first, _input, _method, _output, _hub = (partial(_option, group) for group in GROUPS)


def _of_config(name: str, option: Callable[..., Any] = _method, **settings: Any) -> Any:
    """An option of ConversionConfig, with the help in its docstring."""
    words = re.search(
        rf"^    {name}: (.*?)(?=^    \S|\n\n)", inspect.getdoc(ConversionConfig) or "", re.DOTALL | re.MULTILINE
    )
    help = re.sub(r"`([^`]*)`", r"\1", " ".join(words[1].split())) if words else ""
    return option(help, getattr(ConversionConfig, name), **settings)


def named(text: str | None) -> list[str] | None:
    """The names in a text with commas; None for None."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


@dataclass(kw_only=True)
class Arguments:
    """The arguments of all commands."""

    command: ClassVar[str]
    examples: ClassVar[tuple[str, str]]
    forms: ClassVar[dict[str, tuple[str, ...]]] = {}
    """{option: the words of --to that take it}; all words take the other options."""

    @property
    def progress(self) -> bool:
        """Whether progress is shown."""
        return sys.stderr.isatty() and not getattr(self, "disable_tqdm", False)

    def __post_init__(self) -> None:
        for name in ("max_samples", "max_eval_samples", "batch_size"):
            if getattr(self, name, None) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} must be 1 or more, got {getattr(self, name)}")
        given = {name for name, value in vars(self).items() if value not in (None, False, "none")}
        for name, others in _NEEDS.items():
            if name in given and given.isdisjoint(others):
                raise ValueError(f"--{name} needs --{' or --'.join(others)}")
        if (folder := getattr(self, "output_dir", None)) is not None:
            vars(self)["output_dir"] = os.path.expanduser(folder)  # a shell leaves ~ as it is in --output_dir=~/relu


@dataclass(kw_only=True)
class CheckpointArguments(Arguments):
    """The checkpoint, which is given without the name of an option."""

    model: str = _first("Folder or Hub id of the checkpoint.", is_word=True, reads="model")
    trust_remote_code: bool = _input("Run code that the checkpoint brings. Default: not run.", False)

    @property
    def reading(self) -> dict[str, bool]:
        """The options of `read_checkpoint`."""
        return {"progress": self.progress, "trust_remote_code": self.trust_remote_code}


@dataclass(kw_only=True)
class RowArguments(CheckpointArguments):
    """A data set, and how its rows become inputs of a checkpoint."""

    data: str | None = _first(f"Inputs from where the model is used: {_DATA}. Default: none.", None, reads="dataset")
    data_split: str | None = _input("Split of --data. Default: validation or test, else the only split.", None)
    data_config: str | None = _input("Configuration of --data. Default: the only one.", None)
    max_samples: int | None = _first(f"The most rows, sequences or images of --data. Default: {_AMOUNT}.", None)
    column: str | None = _input("Column of texts, images or features. Default: the only one of its kind.", None)
    pair_column: str | None = _input(
        "Column of the second texts, if the network reads pairs (cross-encoder, inference, paraphrase). --column names "
        "the first texts. Default: single texts.",
        None,
    )
    label_column: str | None = _input(
        "Column of the classes that score a classifier. Default: label or labels, if there is one.", None
    )
    sequence_length: int | None = _input("Tokens in a sequence. Default: what the model takes, at most 1,024.", None)
    seed: int = _input("Random seed that chooses inputs. Default: 0.", 0)
    disable_tqdm: bool = _output(
        "Show no progress. Default: bars where stderr is a terminal, and in convert a line per layer.", False
    )


@dataclass(kw_only=True)
class OutputArguments(RowArguments):
    """The inputs on which networks are compared, the folder that a command writes, and where it goes."""

    evaluation: str | None = _first(
        f"Inputs on which networks are compared: {_DATA}, or none. Labels give a score. Default: in convert the "
        "validation or test split of --data, in export random inputs.",
        None,
        reads="dataset",
    )
    evaluation_split: str | None = _input("Its split. Default: validation or test, else the only split.", None)
    evaluation_config: str | None = _input("Its configuration. Default: the only one.", None)
    max_eval_samples: int | None = _input(f"The most of its inputs. Default: {_AMOUNT}.", None)
    mean: str = _input(
        "Of pictures for an ONNX file: what is subtracted, for each channel, from pixels of 0 to 1. Default: 0.", "0"
    )
    std: str = _input("Of pictures for an ONNX file: what the difference is divided by. Default: 1.", "1")
    image_size: int | None = _input(
        "Of pictures for an ONNX file: their height and width. Default: as the file says.", None
    )
    output_dir: str = _first("Folder to write. It is written whole or not at all.")
    overwrite: bool = _output("Replace an output folder that holds a model. Default: refused.", False)
    license: str | None = _output(
        "Licence for the card, as the Hub spells it. Default: the licence on the original's card.", None
    )
    push_to_hub: str | None = _hub(
        "Push the folder with its card to this Hub repository, such as user/model. Default: nothing is pushed.", None
    )
    private: bool = _hub("Make a new Hub repository private. Default: as your account is set.", False)

    @property
    def of_pictures(self) -> str:
        """The given options of pictures for an ONNX file, in words."""
        defaults = {"mean": "0", "std": "1", "image_size": None}
        return " and ".join(f"--{name}" for name, default in defaults.items() if getattr(self, name) != default)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of_pictures and not is_onnx(self.model):
            raise ValueError(f"{self.of_pictures}: only an ONNX file takes that; a checkpoint has a processor")


@dataclass(kw_only=True)
class ConvertArguments(OutputArguments):
    """Convert a trained network (GELU, SiLU, Mish, λ-GELU) to ReLU, without training, on unlabelled inputs."""

    command = "convert"
    examples = (
        "hf-lgelu convert runs/tabular --data rows.csv --output_dir out/relu",
        "hf-lgelu convert you/your-gpt2 --data you/texts --max_samples 64 --output_dir out/relu",
    )

    model: str = _first("Folder or Hub id of the checkpoint, or an ONNX file.", is_word=True, reads="model")
    data: str | None = _first(
        f"Unlabelled inputs from where the model is used: {_DATA}; of an ONNX file, a folder of pictures, or arrays in "
        "an .npz or .npy file. Default: a language model samples 8,192 tokens of text; other models need inputs.",
        None,
        reads="dataset",
    )
    data_split: str = _input("Split of --data. Default: train.", "train")
    effort: str | None = _of_config("effort", _first, choices=EFFORTS)
    width: float = _of_config("width", _first)
    batch_size: int | None = _of_config("batch_size")
    distill_steps: int | None = _of_config("distill_steps")
    bf16: bool = _of_config("bf16")
    keep: str | None = _method("Names of gates that stay smooth, with commas. Default: none.", None)
    outputs: str | None = _method(
        "Names of the outputs that count, with commas. Default: the outputs that the model's "
        "task reads (logits, boxes, embeddings).",
        None,
    )
    max_kl: float = _of_config("max_kl")
    strict: bool = _of_config("strict")
    dry_run: bool = _first(
        "Fit and write nothing: print what would be converted and refused, what the plain swap would cost, and what "
        "stays smooth. Default: convert.",
        False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config()  # raises for options that do not go together

    def config(self, max_samples: int | None = None) -> ConversionConfig:
        """The options for `convert_to_relu`. `max_samples` says how many of more samples the command has chosen."""
        own = {field.name: getattr(self, field.name) for field in fields(ConversionConfig) if hasattr(self, field.name)}
        names = {"keep": named(self.keep) or (), "outputs": named(self.outputs)}
        return ConversionConfig(**own | names | {"max_samples": max_samples})


@dataclass(kw_only=True)
class ExportArguments(OutputArguments):
    """Export a hardened λ-GELU checkpoint to plain ReLU or GELU, or any checkpoint to ONNX or judged int8."""

    command = "export"
    examples = (
        "hf-lgelu export runs/tabular --output_dir out/relu --evaluation test.csv",
        "hf-lgelu export out/relu --to int8 --data texts.txt --output_dir out/int8 --original you/your-bert",
    )
    forms = _OF_A_FORM

    model: str = _first("Folder or Hub id of the checkpoint, or for int8 an ONNX file.", is_word=True, reads="model")
    data: str | None = _first(
        f"Inputs from where the model is used: {_DATA}; of an ONNX file, a folder of pictures, or arrays in an .npz or "
        ".npy file. Default: none.",
        None,
        reads="dataset",
    )
    to: str = _first(
        f"{'; '.join(map(': '.join, EXPORT_FORMS.items()))}. Default: relu.", "relu", choices=tuple(EXPORT_FORMS)
    )
    original: str | None = _input(
        "The checkpoint before the conversion. int8 may take as much from the model as from this one. Default: the "
        "relative error of int8 decides.",
        None,
        reads="model",
    )
    operations: str | None = _method(
        "What is computed in integers: all operations, or in layers only the matrix products and convolutions. "
        "Default: layers for a network with attention, else all.",
        None,
        choices=("all", "layers"),
    )
    allow_worse: bool = _method("Keep an int8 file that is not good. Default: it is refused.", False)
    allow_soft: bool = _method("Put in ReLU even if gates are soft. Default: soft gates are refused.", False)
    opset: int | None = _method("Version of ONNX's operations, from 11 to 25. Default: 20.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [f"--{name}" for name, forms in self.forms.items() if getattr(self, name) and self.to not in forms]
        if given:
            raise ValueError(f"{' and '.join(given)}: --to {self.to} does not take that; leave it out")
        if self.to == "int8" and self.data is None:
            raise ValueError("--to int8 needs --data: inputs from where the model is used")


@dataclass(kw_only=True)
class CompareArguments(RowArguments):
    """Compare two checkpoints in one table: score, distance, milliseconds, megabytes. Writes nothing."""

    command = "compare"
    examples = (
        "hf-lgelu compare runs/tabular out/relu --data test.csv",
        "hf-lgelu compare you/your-bert out/relu --data texts.txt --int8",
    )

    converted: str = _first("Folder or Hub id of the converted checkpoint.", is_word=True, reads="model")
    data: str = _first(f"Inputs for both networks, best not those of the conversion: {_DATA}.", reads="dataset")
    int8: bool = _first("Add both networks in int8, by ONNX. Default: only float32, by torch.", False)


@dataclass(kw_only=True)
class ProfileArguments(CheckpointArguments):
    """Print the hardness λ of every gate of a λ-GELU checkpoint."""

    command = "profile"
    examples = ("hf-lgelu profile you/your-soft-bert", "hf-lgelu profile runs/checkpoint-104 --plot hardness.png")

    plot: str | None = _output(
        "Picture to write of λ over the epochs, from the checkpoint's trainer_state.json. Default: none is written.",
        None,
    )


@dataclass(kw_only=True)
class DemoArguments(Arguments):
    """Show a conversion in half a minute: train on small pictures of digits, convert, measure on other pictures."""

    command = "demo"
    examples = ("hf-lgelu demo", "hf-lgelu demo --output_dir out/digits")

    output_dir: str = _output("Folder to write. Default: hf-lgelu-demo.", "hf-lgelu-demo")


COMMANDS: dict[str, type[Arguments]] = {
    kind.command: kind
    for kind in (ConvertArguments, ExportArguments, CompareArguments, DemoArguments, ProfileArguments)
}
