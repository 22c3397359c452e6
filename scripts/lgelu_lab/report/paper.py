"""What the paper (arXiv:2603.21991) ran, as far as it says, and where a record differs from it.

No torch here: a record names its settings, and these are the paper's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lgelu_lab.report.configurations import PAPER_LR_MULTIPLIER, is_grid, is_relufied, learns_hardness
from lgelu_lab.report.numbers import count, either
from lgelu_lab.studies.experiments import PAPER_TEMPERATURE
from lgelu_lab.studies.records import RunRecord

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
    classes = record.data.get("classes", recipe.classes)  # older records do not say
    if recipe.classes is not None and classes != recipe.classes:
        found.append(f"{classes} of {recipe.classes} classes")
    if recipe.train_samples is None and config.get("max_train_samples"):
        found.append(f"{count(record.data['train_samples'])} training samples only")
    if config.get("validation_fraction"):
        found.append(f"{config['validation_fraction']:.0%} of the training split held out for selection")
    return found


def _other_recipe(record: RunRecord, recipe: PaperRecipe) -> list[str]:
    found, config = [], record.config
    if not str(config["optim"]).startswith(recipe.optimizer):
        found.append(f"optimizer {config['optim']}, not {recipe.optimizer}")
    for name, words in (("learning_rate", "learning rate"), ("weight_decay", "weight decay")):
        if name in config and config[name] != getattr(recipe, name):
            found.append(f"{words} {config[name]:g}, not {getattr(recipe, name):g}")
    sizes = [(config.get(name), getattr(recipe, name), name.partition("_")[0]) for name in ("image_size", "patch_size")]
    for actual, paper, what in sizes:
        if paper is not None and actual not in (None, paper):
            found.append(f"{what} size {actual}, not {paper}")
    if recipe.model and not config.get("pretrained"):
        size = model_size(config)
        found.append(f"a model from scratch{f' ({size})' if size else ''} in place of {recipe.model}")
    return found


def _other_hardness(record: RunRecord) -> list[str]:
    # The study of t and c differs in them on purpose, and says so in its axes.
    expected: dict[str, tuple[str, Any]] = dict(_HARDNESS) if learns_hardness(record) and not is_grid(record) else {}
    if record.config["harden"]:
        expected |= _HARDENING
    elif is_relufied(record):
        expected["switch_fraction"] = _HARDENING["switch_fraction"]
    found = []
    for name, (words, value) in expected.items():
        actual = record.config.get(name, value)
        if actual != value and not (isinstance(value, float) and abs(actual - value) < 1e-6 * value):
            found.append(f"{words} {_short(actual)}, not {_short(value)}")
    return found


def model_size(config: dict[str, Any]) -> str:
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


def marked(seeds: Sequence[RunRecord], notes: dict[str, str]) -> str:
    """ " [a]", where `seeds` differ from the paper; the letter is that of the same difference in `notes`.

    A new difference is added to `notes` ({difference: letter}) with the next letter.
    """
    found = dict.fromkeys("; ".join(differences(record)) for record in seeds)
    text = " or ".join(filter(None, found))
    if not text:
        return ""
    letter = notes.setdefault(text, _letter(len(notes)))
    return f" [{letter}]"


def trained_on(seeds: Sequence[RunRecord], notes: dict[str, str]) -> str:
    """Epochs × training samples of a row, with a letter where its settings are not the paper's."""
    epochs = either([f"{record.last.epoch:g}" for record in seeds])
    samples = either([count(record.data["train_samples"]) for record in seeds])
    return f"{epochs} × {samples}{marked(seeds, notes)}"


def note_lines(notes: dict[str, str]) -> tuple[str, ...]:
    """One line for each letter that `marked` gave."""
    return tuple(f"[{letter}] Unlike the paper: {text}." for text, letter in notes.items())


def _letter(number: int) -> str:
    return chr(ord("a") + number % 26) * (1 + number // 26)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
