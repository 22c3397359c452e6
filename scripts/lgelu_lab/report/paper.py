"""What the paper (arXiv:2603.21991) ran and found, as far as it says, and where a record differs from it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from lgelu_lab.report.numbers import NONE, count, either
from lgelu_lab.studies.experiments import PAPER_TEMPERATURE
from lgelu_lab.studies.records import RunRecord

PAPER_LR_MULTIPLIER = 9.0
PAPER_TARGET_HARDNESS = 2 / (5e-3 * math.sqrt(2 * math.pi))
"""λ whose gate is within ε = 5e-3 of a step, in the mean: 159.577."""


@dataclass(frozen=True)
class PaperRecipe:
    """One benchmark of the paper.

    Args:
        optimizer: "sgd" or "adamw".
        learning_rate: of the weights.
        weight_decay: likewise.
        epochs: the latest best epoch that the paper names; it does not say how long it trained.
        train_samples: rows of the whole training split; None where they depend on how text is cut.
        eval_samples: rows of the whole split that the metric is measured on; None likewise.
        model: the model by name, where a smaller one may stand in for it.
        image_size: pixels a side and
        patch_size: pixels a side of a patch, of the model that the paper names.
        classes: of the whole data set, where copies may have fewer.
    """

    optimizer: str
    learning_rate: float
    weight_decay: float
    epochs: int
    train_samples: int | None
    eval_samples: int | None
    model: str = ""
    image_size: int | None = None
    patch_size: int | None = None
    classes: int | None = None


PAPER_RECIPES: dict[str, PaperRecipe] = {
    "mlp-adult": PaperRecipe("sgd", 5e-2, 1e-4, 50, 32_561, 16_281),
    "mlp-fmnist": PaperRecipe("sgd", 5e-2, 1e-4, 50, 60_000, 10_000),
    "resnet18-cifar10": PaperRecipe("adamw", 5e-4, 1e-4, 75, 50_000, 10_000),
    "resnet18-cifar100": PaperRecipe("adamw", 5e-4, 1e-4, 75, 50_000, 10_000),
    "deit-tiny-imagenet": PaperRecipe(
        "adamw", 5e-4, 7e-2, 90, 100_000, 10_000, image_size=224, patch_size=16, classes=200
    ),
    "gpt2-wikitext2": PaperRecipe("adamw", 5e-5, 1e-2, 10, None, None, "GPT-2"),
}

# Settings of λ-GELU that the paper gives, and how a difference is said.
_HARDNESS = {"temperature": ("t", PAPER_TEMPERATURE), "hardness_lr_multiplier": ("c", PAPER_LR_MULTIPLIER)}
_HARDENING = {
    "target_hardness": ("target λ", PAPER_TARGET_HARDNESS),
    "switch_fraction": ("switch at", 0.25),
    "hardening_schedule": ("schedule", "linear"),
    "hardening_strategy": ("hardening by", "epoch"),
}

DATA_READ: dict[str, str] = {
    "wikitext2_small": (
        "WikiText-2's test split served as training split, its validation split for evaluation, both of the "
        "word-level form (wikitext-2-v1)"
    ),
    "tiny_imagenet_40": "40 of 200 classes",
    "cifar10": "images re-encoded as WebP at quality 95",
    "cifar100": "images re-encoded as WebP at quality 95",
}
"""{folder that was read: how it differs from the Hub's data set}, of copies that differ."""

_READ_EARLIER = {
    "mlp-adult": "adult", "mlp-fmnist": "fashion_mnist", "gpt2-wikitext2": "wikitext2_small",
    "deit-tiny-imagenet": "tiny_imagenet_40", "resnet18-cifar100": "cifar100",
}  # fmt: skip
"""{benchmark: the folder read} of records from before 0.2.0, which name the Hub id whatever was read."""


def data_folder(record: RunRecord) -> str | None:
    """The name of the folder that a run's data was read from; None for the Hub's, or where the record does not say.

    A shortened copy keeps the name that its README has, whatever its folder is called.
    """
    if "copy_of" in record.data:
        heading = str(record.data.get("readme") or "").partition("\n")[0].removeprefix("# ").strip()
        return heading if heading in DATA_READ else record.data.get("folder")
    return _READ_EARLIER.get(record.config["benchmark"])


def data_read(record: RunRecord) -> str:
    """What a run read, in words: "wikitext2_small, a local copy of Salesforce/wikitext", or the Hub id."""
    folder = data_folder(record)
    hub = record.data.get("copy_of") or record.data.get("source", "")
    return f"{folder}, a local copy of {hub}" if folder else str(hub)


def differences(record: RunRecord) -> tuple[str, ...]:
    """The settings of a run that are not the paper's, in words; none for a benchmark that is not in the paper.

    What the paper leaves open (batch size, learning-rate schedule, momentum, λ₀) is no difference.
    """
    recipe = PAPER_RECIPES.get(record.config["benchmark"])
    if recipe is None:
        return ()
    return (*_shortened(record, recipe), *_other_recipe(record, recipe), *_other_hardness(record))


def _shortened(record: RunRecord, recipe: PaperRecipe) -> list[str]:
    found, config = [], record.config
    if record.last.epoch < recipe.epochs:
        found.append(f"{record.last.epoch:g} of {recipe.epochs} epochs")
    for name, whole in (("train_samples", recipe.train_samples), ("eval_samples", recipe.eval_samples)):
        if whole is not None and record.data[name] != whole:
            what = "training" if name == "train_samples" else "evaluation"
            found.append(f"{count(record.data[name])} of {count(whole)} {what} samples")
    read, classes = DATA_READ.get(data_folder(record) or "", ""), record.data.get("classes", recipe.classes)
    if recipe.classes is not None and classes != recipe.classes and "classes" not in read:
        found.append(f"{classes} of {recipe.classes} classes")
    found += [read] * bool(read)
    if recipe.train_samples is None and config.get("max_train_samples"):
        found.append(f"{count(record.data['train_samples'])} training samples only")
    if recipe.eval_samples is None and config.get("max_eval_samples", True):  # records from before 0.2.0 do not say
        found.append(f"{count(record.data['eval_samples'])} evaluation samples only")
    return found


def _other_recipe(record: RunRecord, recipe: PaperRecipe) -> list[str]:
    found, config = [], record.config
    if not str(config["optim"]).startswith(recipe.optimizer):
        found.append(f"optimizer {config['optim']}, not {recipe.optimizer}")
    for name, words in (("learning_rate", "learning rate"), ("weight_decay", "weight decay")):
        if name in config and config[name] != getattr(recipe, name):
            found.append(f"{words} {config[name]:g}, not {getattr(recipe, name):g}")
    for name in ("image_size", "patch_size"):
        actual, paper = config.get(name), getattr(recipe, name)
        if paper is not None and actual not in (None, paper):
            found.append(f"{name.replace('_', ' ')} {actual}, not {paper}")
    if recipe.model and not config.get("pretrained"):
        size = model_size(config)
        found.append(f"a model from scratch{f' ({size})' if size else ''} in place of {recipe.model}")
    return found


def _other_hardness(record: RunRecord) -> list[str]:
    config, expected = record.config, {}
    if config["activation"] == "lambda_gelu" and not record.name.startswith("grid/"):
        expected |= _HARDNESS  # the study of t and c differs in them on purpose, and says so in its axes
    if config["harden"]:
        expected |= _HARDENING
    elif config.get("relufication"):
        expected["switch_fraction"] = _HARDENING["switch_fraction"]
    found = []
    for name, (words, value) in expected.items():
        actual = config.get(name, value)
        if isinstance(value, float) and abs(actual - value) < 1e-6 * value:
            continue
        if actual != value:
            found.append(f"{words} {_short(actual)}, not {_short(value)}")
    return found


def model_size(config: Mapping[str, Any]) -> str:
    """The options of the model that a run set: "4 layers, width 128"; empty where it has none."""
    words = {
        "num_layers": "{} layers",
        "width": "width {}",
        "num_heads": "{} heads",
        "context_length": "context {}",
        "vocabulary_size": "{} tokens",
        "image_size": "images {0} × {0}",
        "patch_size": "patches {0} × {0}",
    }
    return ", ".join(text.format(config[name]) for name, text in words.items() if config.get(name) is not None)


Notes = dict[str, str]
"""{difference from the paper: its letter} of one table."""


def marked(seeds: pd.DataFrame, notes: Notes) -> str:
    """ " [a]", where `seeds` differ from the paper; the letter is that of the same difference in `notes`.

    A new difference is added to `notes` with the next letter.
    """
    text = " or ".join(filter(None, dict.fromkeys("; ".join(differences(record)) for record in seeds["record"])))
    if not text:
        return ""
    place = len(notes)
    return f" [{notes.setdefault(text, chr(ord('a') + place % 26) * (1 + place // 26))}]"


def trained_on(seeds: pd.DataFrame, notes: Notes) -> str:
    """Epochs × training samples of a row, with a letter where its settings are not the paper's."""
    epochs = either([f"{epoch:g}" for epoch in seeds["last_epoch"]])
    return f"{epochs} × {either([count(samples) for samples in seeds['train_samples']])}{marked(seeds, notes)}"


def note_lines(notes: Notes) -> tuple[str, ...]:
    """One line for each letter that `marked` gave."""
    return tuple(f"[{letter}] Unlike the paper: {text}." for text, letter in notes.items())


@dataclass(frozen=True)
class PaperValues:
    """The paper's own numbers: {benchmark: {configuration key: {quantity: (mean, std or None)}}}, and their source."""

    values: Mapping[str, Mapping[str, Mapping[str, tuple[float, float | None]]]] = field(default_factory=dict)
    citation: str = ""

    def value(self, benchmark: str, key: str, quantity: str) -> tuple[float, float | None] | None:
        """(mean, standard deviation or None); None where the paper has none."""
        return self.values.get(benchmark, {}).get(key, {}).get(quantity)

    def text(self, benchmark: str, key: str, quantity: str) -> str:
        """ "mean ± std" with the paper's own digits; a dash where it has none."""
        found = self.value(benchmark, key, quantity)
        return (
            NONE if found is None else " ± ".join(f"{part:g}".replace("e-", "e−") for part in found if part is not None)
        )

    def has(self, benchmarks: Sequence[str], quantity: str) -> bool:
        """Whether any configuration of these benchmarks has this quantity."""
        return any(quantity in row for name in benchmarks for row in self.values.get(name, {}).values())


def read_paper_values() -> PaperValues:
    """The numbers of paper_values.json.

    The file has {"citation": text, "values": {benchmark: {configuration: {quantity: value}}}}. A configuration is its
    key as in the names of runs ("lambda_gelu-uniform-hardened"), a value a number or [mean, standard deviation].
    """
    raw = json.loads(Path(__file__).with_name("paper_values.json").read_text(encoding="utf-8"))
    values = {
        benchmark: {key: {name: _value(value) for name, value in row.items()} for key, row in rows.items()}
        for benchmark, rows in raw["values"].items()
    }
    return PaperValues(values, raw["citation"])


def _value(value: float | list[float]) -> tuple[float, float | None]:
    mean, deviation = value if isinstance(value, list) else (value, None)
    return float(mean), None if deviation is None else float(deviation)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
