"""What stands behind a word of `hf-lgelu`: an option, the kinds of value that it takes, and those that several share.

Nothing here imports torch.
"""

import argparse
import math
import os.path
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_lgelu.cli.near_names import did_you_mean
from hf_lgelu.refit.target_gates import TARGETS, read_target


@dataclass(frozen=True)
class Option:
    """One argument: a positional one, or "--name". `settings` are argparse's; the help says the default in words."""

    name: str
    help: str
    settings: Mapping[str, Any] = field(default_factory=dict)


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


def positive_number(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"must be names or numbers with commas between, got {text!r}")
    return names


def gates_to_keep(text: str) -> int | list[str]:
    """How many gates, or the names of them."""
    return int(text) if text.isdecimal() else _names(text)


def target_gate(text: str) -> str:
    """The name of a gate, with its slope behind a colon where it takes one."""
    try:
        read_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}{did_you_mean(text, TARGETS)}") from error
    return text


def switch(name: str, help: str) -> Option:
    """An option without a value."""
    return Option(name, help, {"action": "store_true"})


DATA = "a data set's Hub id, a folder of data files or of images, or a CSV, JSON, Parquet or text file"
MODEL = Option("model", "Folder or Hub id of the checkpoint.", {"metavar": "MODEL"})
PATH = os.path.expanduser  # a shell leaves ~ as it is in --output_dir=~/relu
OUTPUT_DIR = Option("--output_dir", "Folder to write; it is complete or not there.", {"required": True, "type": PATH})
SEED = Option("--seed", "Of the choice of the inputs. Left out: 0.", {"type": _seed, "default": 0})
BATCH_SIZE = Option(
    "--batch_size",
    "Inputs computed at once. Left out: 1,024 rows of features, 2,048 tokens or 32 images.",
    {"type": at_least(1)},
)
OVERWRITE = switch("--overwrite", "Replace an output folder that holds a model. Left out: it is refused.")
COLUMNS = (
    Option("--column", "Column of texts, images or features. Left out: the one that fits."),
    Option(
        "--pair_column",
        "Column of the second texts of a network of pairs (a cross-encoder, inference, paraphrase); the first are "
        "those of --column. Left out: every text stands alone.",
    ),
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
EVALUATION = (
    Option("--evaluation_split", "Which split of it. Left out: validation or test, else its only one."),
    Option("--evaluation_config", "Which of its configurations. Left out: its only one."),
    Option(
        "--max_eval_samples",
        "At most so many inputs of it. Left out: 8,192 rows of features, 1,024 images, or sequences of together "
        "32,768 tokens.",
        {"type": at_least(1)},
    ),
)
OUTPUTS = Option(
    "--outputs",
    "Names of the outputs that count, with commas between; the first is compared. Left out: those that the model's "
    "task reads (logits, boxes, embeddings).",
    {"type": _names, "metavar": "NAMES"},
)
DISABLE_TQDM = switch("--disable_tqdm", "No progress bars.")
LICENSE = Option("--license", "Licence on the card, as the Hub spells it. Left out: that of the original's card.")
PUBLISHING = (
    Option(
        "--push_to_hub",
        "Push the folder with its card to this Hub repository, e.g. user/model; without a value, to one of yours that "
        "is named like the folder. Left out: nothing is pushed.",
        {"nargs": "?", "const": "", "metavar": "REPOSITORY"},
    ),
    switch("--private", "Make a new Hub repository a private one. Left out: as your account has it."),
    LICENSE,
)


FACTS = Option(
    "--facts",
    "What is known of its training, for the card: a file that hf_lgelu.save_card_facts wrote, or its folder. Left out: "
    "the one in the checkpoint's folder, if there is one.",
)
