"""The table COMMANDS: what `hf-lgelu` offers, one row a command, and the options that several share.

A new command is a row here and a module with its function. Nothing here imports torch.
"""

import argparse
import math
import os.path
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_lgelu.cli.near_names import did_you_mean


@dataclass(frozen=True)
class Option:
    """One argument: a positional one, or "--name". `settings` are argparse's; the help says the default in words."""

    name: str
    help: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """One word after `hf-lgelu`.

    `run` is "module:function", called with the parsed arguments. `examples` are two calls. `complaint` says what is
    wrong with arguments that are right one by one, or None.
    """

    name: str
    summary: str
    run: str
    options: tuple[Option, ...]
    examples: tuple[str, str]
    complaint: Callable[[argparse.Namespace], str | None] = lambda arguments: None


def at_least(smallest: int) -> Callable[[str], int]:
    """A whole number from `smallest` on, as argparse wants its types."""

    def read(text: str) -> int:
        if not text.lstrip("+-").isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"must be a whole number, {smallest} or more, got {text!r}")
        return int(text)

    return read


def _seed(text: str) -> int:
    if at_least(0)(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be below 2**32, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


TARGET_NAMES = ("relu", "relu6", "leaky_relu", "hardswish", "relu2")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"must be names or numbers with commas between, got {text!r}")
    return names


def _keep(text: str) -> int | list[str]:
    return int(text) if text.isdecimal() else _names(text)


def _target(text: str) -> str:
    if text.partition(":")[0] not in TARGET_NAMES:
        near = did_you_mean(text, TARGET_NAMES)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(TARGET_NAMES)}{near}")
    return text


def _counts(text: str) -> list[int]:
    return [at_least(0)(count) for count in _names(text)]


def _switch(name: str, help: str) -> Option:
    return Option(name, help, {"action": "store_true"})


_DATA = "a data set's Hub id, a folder of data files or of images, or a CSV, JSON, Parquet or text file"
_MODEL = Option("model", "Folder or Hub id of the checkpoint.", {"metavar": "MODEL"})
_PATH = os.path.expanduser  # a shell leaves ~ as it is in --output_dir=~/relu
_OUTPUT_DIR = Option("--output_dir", "Folder to write; it is complete or not there.", {"required": True, "type": _PATH})
_SEED = Option("--seed", "Of the choice of the inputs. Left out: 0.", {"type": _seed, "default": 0})
_BATCH_SIZE = Option(
    "--batch_size",
    "Inputs computed at once. Left out: 1,024 rows of features, 2,048 tokens or 32 images.",
    {"type": at_least(1)},
)
_OVERWRITE = _switch("--overwrite", "Replace an output folder that holds a model. Left out: it is refused.")
_COLUMNS = (
    Option("--column", "Column of texts, images or features. Left out: the one that fits."),
    Option(
        "--label_column",
        "Column of a classifier's classes, for scores alone. Left out: label or labels, if there is one.",
    ),
    Option(
        "--sequence_length",
        "Tokens of a sequence. Left out: what the model takes, at most 1,024.",
        {"type": at_least(2)},
    ),
)
_EVALUATION = (
    Option("--evaluation_split", "Which split of it. Left out: validation or test, else its only one."),
    Option("--evaluation_config", "Which of its configurations. Left out: its only one."),
    Option(
        "--max_eval_samples",
        "At most so many inputs of it. Left out: 8,192 rows of features, 1,024 images, or sequences of together "
        "32,768 tokens.",
        {"type": at_least(1)},
    ),
)
_OUTPUTS = Option(
    "--outputs",
    "Names of the outputs that count, with commas between; the first is compared. Left out: those that the model's "
    "task reads (logits, boxes, embeddings).",
    {"type": _names, "metavar": "NAMES"},
)
_DISABLE_TQDM = _switch("--disable_tqdm", "No progress bars.")
_LICENSE = Option("--license", "Licence on the card, as the Hub spells it. Left out: that of the original's card.")
_PUBLISHING = (
    Option(
        "--push_to_hub",
        "Push the folder with its card to this Hub repository, e.g. user/model; without a value, to one of yours that "
        "is named like the folder. Left out: nothing is pushed.",
        {"nargs": "?", "const": "", "metavar": "REPOSITORY"},
    ),
    _switch("--private", "Make a new Hub repository a private one. Left out: as your account has it."),
    _LICENSE,
)


_FACTS = Option(
    "--facts",
    "What is known of its training, for the card: a file that hf_lgelu.save_card_facts wrote, or its folder. Left out: "
    "the one in the checkpoint's folder, if there is one.",
)


def _onnx_has_no_card(arguments: argparse.Namespace) -> str | None:
    if arguments.to != "onnx":
        return None
    if arguments.push_to_hub is not None:
        return "--push_to_hub: only checkpoints are pushed with a card; push an ONNX file with `hf upload`"
    given = [f"--{name}" for name in ("license", "facts") if getattr(arguments, name) is not None]
    return f"{' and '.join(given)}: for a card, and --to onnx writes none; leave that out" if given else None


def _privacy_is_of_a_push(arguments: argparse.Namespace) -> str | None:
    if arguments.private and arguments.push_to_hub is None:
        return "--private: of a push, and nothing is pushed without --push_to_hub; add that, or leave --private out"
    return None


# What says which rows of a set are read, and how; of the commands other than convert all of it is of --evaluation.
_OF_EVALUATION = ("evaluation_split", "evaluation_config", "max_eval_samples")
_OF_ANY_SET = ("column", "label_column", "sequence_length", "batch_size")


def _evaluation_is_named(arguments: argparse.Namespace, options: Sequence[str]) -> str | None:
    given = [f"--{name}" for name in options if getattr(arguments, name) is not None]
    if given and arguments.evaluation in (None, "none"):
        return f"nothing reads {' and '.join(given)} without a set that --evaluation names; name one, or leave that out"
    return None


def _convert_fits(arguments: argparse.Namespace) -> str | None:
    if arguments.equalize and arguments.target.partition(":")[0] not in ("relu", "leaky_relu"):
        return f"--equalize: units of {arguments.target} cannot be rescaled, those of relu and leaky_relu can"
    # Left out, --evaluation may be another split of --data.
    unused = None if arguments.evaluation is None else _evaluation_is_named(arguments, _OF_EVALUATION)
    return unused or _privacy_is_of_a_push(arguments)


def _harden_fits(arguments: argparse.Namespace) -> str | None:
    if arguments.allow_soft and arguments.to != "relu":
        return f"--allow_soft: --to {arguments.to} takes soft gates as they are, --to relu alone asks; leave it out"
    refusals = (_onnx_has_no_card, _onnx_has_no_scores, _privacy_is_of_a_push, _evaluation_is_used)
    return next(filter(None, (refusal(arguments) for refusal in refusals)), None)


def _onnx_has_no_scores(arguments: argparse.Namespace) -> str | None:
    given = [f"--{name}" for name in ("batch_size", "label_column", "max_eval_samples") if getattr(arguments, name)]
    if arguments.to == "onnx" and given:
        return f"{' and '.join(given)}: --to onnx compares outputs on the first rows and scores none; leave that out"
    return None


def _evaluation_is_used(arguments: argparse.Namespace) -> str | None:
    return _evaluation_is_named(arguments, (*_OF_EVALUATION, *_OF_ANY_SET))


_ROWS = (
    Command(
        name="convert",
        summary="a trained smooth network (GELU, SiLU, Mish, λ-GELU) to ReLU without training, on unlabelled inputs",
        run="hf_lgelu.cli.convert:convert",
        options=(
            _MODEL,
            Option("--data", f"Unlabelled inputs like those the model meets: {_DATA}.", {"required": True}),
            _OUTPUT_DIR,
            Option("--data_split", "Which split of it. Left out: train.", {"default": "train"}),
            Option("--data_config", "Which of its configurations. Left out: its only one."),
            Option(
                "--max_samples",
                "At most so many of its rows, sequences or images. Left out: 8,192 rows of features, 1,024 images, or "
                "sequences of together 32,768 tokens, but at least 32.",
                {"type": at_least(1)},
            ),
            *_COLUMNS,
            Option(
                "--evaluation",
                f"A second set, on which nothing is fitted: {_DATA}, or none. Left out: the validation or test split "
                "of --data, if it has one.",
            ),
            *_EVALUATION,
            _SEED,
            _BATCH_SIZE,
            _OUTPUTS,
            Option(
                "--max_kl",
                "Nats of mean KL to the original (of outputs that are no class scores, relative error) from where on a "
                "result counts as far from it. Left out: 0.1.",
                {"type": _positive, "default": 0.1},
            ),
            _switch("--strict", "Refuse a result beyond --max_kl. Left out: its report and card warn of it."),
            Option(
                "--target",
                "What the gates become: relu, relu6, leaky_relu, hardswish or relu2; leaky_relu:0.1 has another slope "
                "than 0.01, leaky_relu:fitted the nearest. Left out: relu.",
                {"type": _target, "default": "relu", "metavar": "GATE"},
            ),
            Option(
                "--zeros",
                "Share of zeros that is wanted behind every gate, 0.9 or so, for what skips work on them. Left out: as "
                "it comes.",
                {"type": _positive},
            ),
            Option(
                "--keep",
                "Gates that stay smooth: how many, the dearest, or their names with commas between. Left out: none.",
                {"type": _keep, "default": 0, "metavar": "GATES"},
            ),
            Option(
                "--keep_curve",
                "Convert once more for each of these numbers of gates kept, and draw how near that comes (keep.png, "
                "and in report.json). Without a value, 0,1,2,4,8. Left out: not drawn.",
                {"type": _counts, "nargs": "?", "const": [0, 1, 2, 4, 8], "metavar": "NUMBERS"},
            ),
            Option(
                "--effort",
                "How hard it tries: refit, the maps behind the gates; place, each ReLU's kink and slope too; blocks, "
                "both maps of every block; distill, all blocks together. Each after the ones before, and kept only "
                "where inputs held out are nearer for it. Left out: refit, with --tolerance as far as needed.",
                {"choices": ("refit", "place", "blocks", "distill")},
            ),
            Option(
                "--width_budget",
                "So many times the units in every block: those added carry what is linear, or are copies with kinks of "
                "their own. 1.25 gives most for its size, 2 and more come as near as one likes. Left out: 1.",
                {"type": _positive, "default": 1.0},
            ),
            Option(
                "--tolerance",
                "Nats of mean KL to the original (or relative error) on inputs held out that is to be reached: it "
                "tries harder until it is, or refuses. Left out: no such bound.",
                {"type": _positive},
            ),
            Option(
                "--max_seconds",
                "End what is above the refit after so long, with what was reached by then. Left out: no bound.",
                {"type": _positive},
            ),
            Option(
                "--distill_steps",
                "Steps of --effort distill: the more, the nearer, where there are inputs enough. Left out: 200, and "
                "600 where the first few bring much.",
                {"type": int},
            ),
            _switch(
                "--bf16",
                "Take the steps of --effort distill with products in bfloat16: quicker where the processor or GPU has "
                "it. Left out: in the model's own precision.",
            ),
            _switch(
                "--equalize",
                "Bring the units to ranges that int8 can hold together, by powers of two: what the network computes in "
                "float stays. Left out: units are as loud as they were fitted.",
            ),
            _switch(
                "--resume",
                "Keep each layer that is done in a hidden folder beside --output_dir until all is saved, and go on "
                "from there. Left out: a call that was killed begins anew.",
            ),
            _switch(
                "--allow_unrefitted",
                "Swap gates even where the linear maps behind them cannot be refitted. Left out: that is refused.",
            ),
            _OVERWRITE,
            *_PUBLISHING,
            _DISABLE_TQDM,
        ),
        examples=(
            "hf-lgelu convert runs/tabular --data rows.csv --output_dir out/relu",
            "hf-lgelu convert you/your-gpt2 --data you/texts --max_samples 64 --output_dir out/relu --push_to_hub",
        ),
        complaint=_convert_fits,
    ),
    Command(
        name="harden",
        summary="a hardened λ-GELU checkpoint to a plain ReLU, GELU or ONNX one",
        run="hf_lgelu.cli.harden:harden",
        options=(
            _MODEL,
            _OUTPUT_DIR,
            Option(
                "--to",
                "relu: ReLU in the place of hard gates; gelu: GELU, with λ folded into the weights, exactly; onnx: the "
                "model as it is, for onnxruntime. Left out: relu.",
                {"choices": ("relu", "gelu", "onnx"), "default": "relu"},
            ),
            Option(
                "--evaluation",
                f"Inputs on which the checkpoint and what becomes of it are compared, with scores where there are "
                f"labels: {_DATA}. Left out: some random inputs.",
            ),
            *_EVALUATION,
            *_COLUMNS,
            _SEED,
            _BATCH_SIZE,
            _switch("--allow_soft", "Put ReLU in even where gates are soft. Left out: that is refused."),
            _OVERWRITE,
            _FACTS,
            *_PUBLISHING,
            _DISABLE_TQDM,
        ),
        examples=(
            "hf-lgelu harden runs/tabular --output_dir out/relu --evaluation test.csv",
            "hf-lgelu harden runs/soft --to gelu --output_dir out/gelu",
        ),
        complaint=_harden_fits,
    ),
    Command(
        name="check",
        summary="is a checkpoint piecewise linear, what would ReLU cost, what stands in the way; nothing is written",
        run="hf_lgelu.cli.check:check",
        options=(
            _MODEL,
            Option(
                "--evaluation",
                f"Inputs on which the swap is tried, with scores where there are labels: {_DATA}. Left out: some "
                "random inputs.",
            ),
            *_EVALUATION,
            *_COLUMNS,
            _SEED,
            _BATCH_SIZE,
            _OUTPUTS,
            _DISABLE_TQDM,
        ),
        examples=("hf-lgelu check you/your-bert", "hf-lgelu check runs/tabular --evaluation test.csv"),
        complaint=_evaluation_is_used,
    ),
    Command(
        name="profile",
        summary="the hardness λ of every gate of a λ-GELU checkpoint, as text and as a picture",
        run="hf_lgelu.cli.profile:profile",
        options=(
            _MODEL,
            Option("--figure", "PNG to write. Left out: none.", {"metavar": "FILE", "type": _PATH}),
            _switch("--overwrite", "Replace a picture that is there. Left out: it is refused."),
        ),
        examples=("hf-lgelu profile runs/tabular", "hf-lgelu profile runs/tabular --figure hardness.png"),
    ),
    Command(
        name="card",
        summary="a model card for a λ-GELU checkpoint, or for what harden made of one",
        run="hf_lgelu.cli.card:card",
        options=(
            _MODEL,
            _FACTS,
            Option("--repo_id", "Hub repository that the card is for, e.g. user/model. Left out: none is named."),
            _LICENSE,
            _switch("--overwrite", "Replace a card that is there. Left out: it is refused."),
        ),
        examples=(
            "hf-lgelu card runs/tabular --license mit",
            "hf-lgelu card out/relu --facts runs/tabular --overwrite",
        ),
    ),
    Command(
        name="kernels",
        summary="which implementations of the activation this machine has, and why others are not used",
        run="hf_lgelu.cli.kernels:kernels",
        options=(),
        examples=("hf-lgelu kernels", "LGELU_KERNEL=eager hf-lgelu kernels"),
    ),
)

COMMANDS: dict[str, Command] = {command.name: command for command in _ROWS}
