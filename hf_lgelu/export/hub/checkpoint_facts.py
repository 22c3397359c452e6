"""What a model card has to know of a checkpoint to say how it is loaded."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from lgelu_lab.benchmarks.cifar_resnet import ARCHITECTURE
from lgelu_lab.studies.records import RunRecord


@dataclass(frozen=True)
class CheckpointFacts:
    """What decides how a checkpoint is loaded.

    `architecture` is timm's name of it in transformers' wrapper; `layers` are the MLP's hidden layers; `own_code`
    says that mlp.py lies beside the weights (`attach_model_code`).
    """

    model_class: str
    architecture: str | None = None
    layers: int | None = None
    classes: int | None = None
    own_code: bool = False


def facts_of_record(record: RunRecord) -> CheckpointFacts:
    """The facts of the network that a benchmark's run trained."""
    _, small_resnet, classes = record.config["benchmark"].partition("resnet18-cifar")
    return CheckpointFacts(
        model_class=record.model["class"],
        architecture=ARCHITECTURE if small_resnet else None,
        layers=record.model["activation_sites"],
        # The earliest records do not say how many; CIFAR-10 and CIFAR-100 do.
        classes=record.data.get("classes") or (int(classes) if small_resnet else None),
    )


def facts_of_folder(folder: str | os.PathLike) -> CheckpointFacts:
    """The facts of a saved model, from its config.json. Raises FileNotFoundError, or ValueError for no class in it."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    names = config.get("architectures")
    if not names:
        raise ValueError(f"{folder}/config.json names no architectures; save the model with save_pretrained")
    return CheckpointFacts(
        model_class=names[0],
        architecture=config.get("architecture"),
        layers=config.get("num_hidden_layers"),
        # The wrapper's config says num_classes; of other families with two classes the config says nothing.
        classes=config.get("num_classes") or len(config.get("id2label", ())) or None,
        own_code="auto_map" in config,
    )
