"""The conversions that are timed: a network with random weights, random inputs, and what we want to stay within.

Memory does not depend on what the weights are, and time hardly (above 2,048 features a few strengths more or less are
tried); how good a conversion is does, and is measured on trained networks (scripts/downstream.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_lgelu import MLPConfig, MLPForClassification
from lgelu_lab.benchmarks.cifar_resnet import ARCHITECTURE

Inputs = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One conversion.

    Args:
        name: its key.
        units: rows, sequences or images given; `rows` counts tokens of sequences.
        width: features of a row at the widest layer.
        build: → (the network, its calibration inputs), from torch's global generator.
        target_seconds, target_gib: what it should stay within on two CPU cores; None where nothing is set.
        sweep: "rows" or "width" for the points of the figure, "" for the named networks.
    """

    name: str
    units: int
    rows: int
    width: int
    build: Callable[[], tuple[nn.Module, Inputs]]
    target_seconds: float | None = None
    target_gib: float | None = None
    sweep: str = ""


def _mlp(width: int, layers: int, rows: int, features: int) -> Callable[[], tuple[nn.Module, Inputs]]:
    def build() -> tuple[nn.Module, Inputs]:
        config = MLPConfig(
            num_features=features, hidden_size=width, num_hidden_layers=layers, num_labels=10, hidden_act="gelu"
        )
        return MLPForClassification(config), {"features": torch.randn(rows, features)}

    return build


def _gpt2(config: Mapping[str, Any], sequences: int, tokens: int) -> Callable[[], tuple[nn.Module, Inputs]]:
    def build() -> tuple[nn.Module, Inputs]:
        model = GPT2LMHeadModel(GPT2Config(activation_function="gelu", **config))
        return model, {"input_ids": torch.randint(model.config.vocab_size, (sequences, tokens))}

    return build


def _resnet18(images: int) -> Callable[[], tuple[nn.Module, Inputs]]:
    def build() -> tuple[nn.Module, Inputs]:
        import timm

        return timm.create_model(ARCHITECTURE, num_classes=10, act_layer="gelu"), torch.randn(images, 3, 32, 32)

    return build


_SMALL_GPT2 = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 4096}
_ROW_COUNTS = tuple(2**power for power in range(11, 18))
_WIDTHS = tuple(2**power for power in range(7, 12))
_SWEEP_ROWS, _SWEEP_WIDTH, _SWEEP_FEATURES = 4096, 256, 128

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("mlp-4x256", 8192, 8192, 256, _mlp(256, 4, 8192, 784), 2.0),
        Case("gpt2-4x128", 64, 8192, 512, _gpt2(_SMALL_GPT2, 64, 128), 5.0),
        Case("gpt2-124m", 16, 16_384, 3072, _gpt2({}, 16, 1024), 600.0, 6.0),
        Case("resnet18-cifar", 1024, 1024, 4864, _resnet18(1024), 60.0),
        *(
            Case(f"rows-{rows}", rows, rows, _SWEEP_WIDTH, _mlp(_SWEEP_WIDTH, 4, rows, _SWEEP_FEATURES), sweep="rows")
            for rows in _ROW_COUNTS
        ),
        *(
            Case(
                f"width-{width}", _SWEEP_ROWS, _SWEEP_ROWS, width, _mlp(width, 2, _SWEEP_ROWS, _SWEEP_FEATURES),
                sweep="width",
            )
            for width in _WIDTHS
        ),
    )
}  # fmt: skip
NAMED = tuple(case.name for case in CASES.values() if not case.sweep)
