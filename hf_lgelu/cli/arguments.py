"""What each command of `hf-lgelu` takes: one dataclass a command, and the table COMMANDS.

A new command is a dataclass, a row and a module with its function. Nothing here imports torch.
"""

import dataclasses
import inspect
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_lgelu.export.targets import EXPORT_TARGETS
from hf_lgelu.refit.config import EFFORTS, ConversionConfig

_DATA = "a data set's Hub id, a folder of data files or of images, or a CSV, JSON, Parquet or text file"
_TARGETS = "; ".join(f"{target.name}: {target.description}" for target in EXPORT_TARGETS.values())


def _option(help: str, default: Any = dataclasses.MISSING, **settings: Any) -> Any:
    return field(default=default, metadata={"help": help.replace("%", "%%"), **settings})


def _of_config(name: str, **settings: Any) -> Any:
    """An option of ConversionConfig, with the words of its docstring."""
    words = re.search(
        rf"^    {name}: (.*?)(?=^    \S|\n\n)", inspect.getdoc(ConversionConfig) or "", re.DOTALL | re.MULTILINE
    )
    help = re.sub(r"`([^`]*)`", r"\1", " ".join(words[1].split())) if words else ""
    return _option(help, getattr(ConversionConfig, name), **settings)


def named(text: str | None) -> list[str] | None:
    """Names with commas between, as a list; None of None."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


@dataclass(kw_only=True)
class CheckpointArguments:
    """The checkpoint, which is every command's first word."""

    model: str = _option("Folder or Hub id of the checkpoint: the first word, or this.")

    def __post_init__(self) -> None:
        for name in ("max_samples", "max_eval_samples", "batch_size"):
            _require(self, name, getattr(self, name, None) is None or getattr(self, name) >= 1, "1 or more")
        for name in ("output_dir", "figure"):  # a shell leaves ~ as it is in --output_dir=~/relu
            if getattr(self, name, None) is not None:
                setattr(self, name, os.path.expanduser(getattr(self, name)))


@dataclass(kw_only=True)
class RowArguments(CheckpointArguments):
    """How rows of a data set become inputs of a checkpoint."""

    column: str | None = _option("Column of texts, images or features. Left out: the only one there is.", None)
    pair_column: str | None = _option(
        "Column of the second texts of a network of pairs (a cross-encoder, inference, paraphrase); the first are "
        "those of --column. Left out: every text stands alone.",
        None,
    )
    label_column: str | None = _option(
        "Column of a classifier's classes, for scores alone. Left out: label or labels, if there is one.", None
    )
    sequence_length: int | None = _option("Tokens of a sequence. Left out: what the model takes, at most 1,024.", None)
    seed: int = _option("Of the choice of the inputs. Left out: 0.", 0)
    disable_tqdm: bool = _option("No progress bars.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "seed", 0 <= self.seed < 2**32, "from 0 to below 2**32")
        _require(self, "sequence_length", self.sequence_length is None or self.sequence_length >= 2, "2 or more")


@dataclass(kw_only=True)
class InputArguments(RowArguments):
    """The inputs on which networks are compared, and how a data set becomes inputs."""

    evaluation: str | None = _option(
        f"Inputs on which networks are compared, with scores where there are labels: {_DATA}, or none. Left out: of "
        "convert the validation or test split of --data, if it has one; of other commands random inputs.",
        None,
    )
    evaluation_split: str | None = _option("Which split. Left out: validation or test, else its only one.", None)
    evaluation_config: str | None = _option("Which of its configurations. Left out: its only one.", None)
    max_eval_samples: int | None = _option(
        "At most so many of its inputs. Left out: 8,192 rows of features, 1,024 images, or sequences of together "
        "32,768 tokens.",
        None,
    )
    batch_size: int | None = _option(
        "Inputs computed at once. Left out: 1,024 rows of features, 2,048 tokens or 32 images.", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        unread = [f"--{name}" for name in self._of_a_set() if getattr(self, name) is not None]
        if unread:
            raise ValueError(f"nothing reads {' and '.join(unread)} without a set that --evaluation names")

    def _of_a_set(self) -> Sequence[str]:
        """Options that nothing reads without --evaluation."""
        options = ("evaluation_split", "evaluation_config", "max_eval_samples", "column", "pair_column", "label_column")
        return () if self.evaluation not in (None, "none") else (*options, "sequence_length", "batch_size")


@dataclass(kw_only=True)
class OutputArguments(InputArguments):
    """The folder that a command writes, and where it goes."""

    output_dir: str = _option("Folder to write; it is complete or not there.")
    overwrite: bool = _option("Replace an output folder that holds a model. Left out: it is refused.", False)
    license: str | None = _option(
        "Licence on the card, as the Hub spells it. Left out: that of the original's card.", None
    )
    push_to_hub: str | None = _option(
        "Push the folder with its card to this Hub repository, such as user/model. Left out: nothing is pushed.", None
    )
    private: bool = _option("Make a new Hub repository a private one. Left out: as your account has it.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.private and self.push_to_hub is None:
            raise ValueError("--private: of a push, and nothing is pushed without --push_to_hub")


@dataclass(kw_only=True)
class ConvertArguments(OutputArguments):
    """Of `hf-lgelu convert`, as `convert_to_relu` names them."""

    data: str = _option(f"Unlabelled inputs like those the model meets: {_DATA}.")
    data_split: str = _option("Which split of it. Left out: train.", "train")
    data_config: str | None = _option("Which of its configurations. Left out: its only one.", None)
    max_samples: int | None = _option(
        "At most so many of its rows, sequences or images. Left out: 8,192 rows of features, 1,024 images, or "
        "sequences of together 32,768 tokens, but at least 32.",
        None,
    )
    target: str = _of_config("target")
    effort: str | None = _of_config("effort", choices=EFFORTS)
    width: float = _of_config("width")
    tolerance: float | None = _of_config("tolerance")
    max_seconds: float | None = _of_config("max_seconds")
    distill_steps: int | None = _of_config("distill_steps")
    bf16: bool = _of_config("bf16")
    keep: str = _option(
        "Gates that stay smooth: how many, the dearest, or their names with commas between. Default: none.", "0"
    )
    outputs: str | None = _option(
        "Names of the outputs that count, with commas between; the first is compared. Default: those that the model's "
        "task reads (logits, boxes, embeddings).",
        None,
    )
    max_kl: float = _of_config("max_kl")
    strict: bool = _of_config("strict")
    equalize: bool = _option(
        "Bring the units to ranges that int8 can hold together, by powers of two: what the network computes in float "
        "stays. Left out: units are as loud as they were fitted.",
        False,
    )
    compare: bool = _option(
        "At the end print both networks beside each other: score, distance, milliseconds, megabytes. Left out: that is "
        "`hf-lgelu compare`.",
        False,
    )
    int8: bool = _option("With --compare: both networks in int8 as well, by ONNX. Left out: in float32.", False)
    resume: bool = _option(
        "Keep each layer that is done in a hidden folder beside --output_dir until all is saved, and go on from "
        "there. Left out: a call that was killed begins anew.",
        False,
    )
    allow_unrefitted: bool = _of_config("allow_unrefitted")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "keep", bool(named(self.keep)), "a number, or names with commas between")
        _require(self, "int8", self.compare or not self.int8, "left out without --compare")
        self.config()  # raises where options do not go together
        if self.equalize and self.target.partition(":")[0] not in ("relu", "leaky_relu"):
            raise ValueError(f"--equalize: units of {self.target} cannot be rescaled, those of relu and leaky_relu can")

    def config(self, checkpoint_dir: Path | None = None) -> ConversionConfig:
        """The same as `convert_to_relu` takes it; the command has chosen the samples itself."""
        own = {field.name: getattr(self, field.name) for field in fields(ConversionConfig) if hasattr(self, field.name)}
        keep = int(self.keep) if self.keep.isdecimal() else named(self.keep) or 0
        own |= {"keep": keep, "outputs": named(self.outputs), "max_samples": None, "checkpoint_dir": checkpoint_dir}
        return ConversionConfig(**own)

    def _of_a_set(self) -> Sequence[str]:
        # Left out, --evaluation may be another split of --data.
        return ("evaluation_split", "evaluation_config", "max_eval_samples") if self.evaluation == "none" else ()


@dataclass(kw_only=True)
class ExportArguments(OutputArguments):
    """Of `hf-lgelu export`."""

    to: str = _option(f"{_TARGETS}. Left out: relu.", "relu", choices=tuple(EXPORT_TARGETS))
    allow_soft: bool = _option("Put ReLU in even where gates are soft. Left out: that is refused.", False)
    opset: int | None = _option("Version of ONNX's operations, 11 to 25. Left out: 20.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        target = EXPORT_TARGETS[self.to]
        if self.allow_soft and not target.is_relu:
            raise ValueError(f"--allow_soft: --to {self.to} takes soft gates as they are, and does not ask")
        if self.opset is not None and target.is_checkpoint:
            raise ValueError(f"--opset: of an ONNX file, and --to {self.to} writes none")
        of_a_card = ("push_to_hub", "license", "batch_size", "label_column", "max_eval_samples")
        given = [f"--{name}" for name in of_a_card if getattr(self, name) is not None]
        if given and not target.is_checkpoint:
            raise ValueError(f"{' and '.join(given)}: --to {self.to} writes no card and scores nothing; leave that out")


@dataclass(kw_only=True)
class CheckArguments(InputArguments):
    """Of `hf-lgelu check`."""

    outputs: str | None = _option(
        "Outputs that count, with commas between. Left out: those that the model's task reads.", None
    )


@dataclass(kw_only=True)
class CompareArguments(RowArguments):
    """Of `hf-lgelu compare`."""

    model: str = _option("Folder or Hub id of the original: the first word, or this.")
    converted: str = _option("Folder or Hub id of the other network: the second word, or this.")
    data: str = _option(f"Inputs of both, best such that the other was not fitted to them: {_DATA}.")
    data_split: str | None = _option("Which split. Left out: validation or test, else its only one.", None)
    data_config: str | None = _option("Which of its configurations. Left out: its only one.", None)
    max_samples: int | None = _option(
        "At most so many of its inputs. Left out: 8,192 rows of features, 1,024 images, or sequences of together "
        "32,768 tokens.",
        None,
    )
    int8: bool = _option("Both networks in int8 as well, by ONNX. Left out: in float32, by torch.", False)


@dataclass(kw_only=True)
class ProfileArguments(CheckpointArguments):
    """Of `hf-lgelu profile`."""

    figure: str | None = _option("PNG to write. Left out: none.", None)
    overwrite: bool = _option("Replace a picture that is there. Left out: it is refused.", False)


def _require(arguments: Any, name: str, is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(f"--{name} must be {what}, got {getattr(arguments, name)!r}")


@dataclass(frozen=True)
class Command:
    """One word after `hf-lgelu`: `run` is "module:function", called with the `arguments`; `examples` are two calls.

    `positional` are the options that a call may give without their names, before all others.
    """

    name: str
    summary: str
    run: str
    arguments: type[CheckpointArguments]
    examples: tuple[str, str]
    positional: tuple[str, ...] = ("model",)


COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command(
            "convert",
            "a trained smooth network (GELU, SiLU, Mish, λ-GELU) to ReLU without training, on unlabelled inputs",
            "hf_lgelu.cli.convert:convert",
            ConvertArguments,
            (
                "hf-lgelu convert runs/tabular --data rows.csv --output_dir out/relu",
                "hf-lgelu convert you/your-gpt2 --data you/texts --max_samples 64 --output_dir out/relu",
            ),
        ),
        Command(
            "export",
            "a hardened λ-GELU checkpoint to a plain ReLU, GELU or ONNX one",
            "hf_lgelu.cli.export:export",
            ExportArguments,
            (
                "hf-lgelu export runs/tabular --output_dir out/relu --evaluation test.csv",
                "hf-lgelu export runs/soft --to gelu --output_dir out/gelu",
            ),
        ),
        Command(
            "compare",
            "two checkpoints beside each other: score, distance, milliseconds, megabytes; nothing is written",
            "hf_lgelu.cli.compare:compare",
            CompareArguments,
            (
                "hf-lgelu compare runs/tabular out/relu --data test.csv",
                "hf-lgelu compare you/your-bert out/relu --data texts.txt --int8",
            ),
            positional=("model", "converted"),
        ),
        Command(
            "check",
            "is a checkpoint piecewise linear, what would ReLU cost, what stands in the way; nothing is written",
            "hf_lgelu.cli.check:check",
            CheckArguments,
            ("hf-lgelu check you/your-bert", "hf-lgelu check runs/tabular --evaluation test.csv"),
        ),
        Command(
            "profile",
            "the hardness λ of every gate of a λ-GELU checkpoint, as text and as a picture",
            "hf_lgelu.cli.profile:profile",
            ProfileArguments,
            ("hf-lgelu profile runs/tabular", "hf-lgelu profile runs/tabular --figure hardness.png"),
        ),
    )
}
