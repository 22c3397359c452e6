"""timm architectures in tiny sizes, built by timm itself; the columns are those of family.Family.

This file imports no hf_lgelu, as family.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from family import enlarge, normal
from timm.layers import GatedMlp
from timm.models.mlp_mixer import MlpMixer, ResBlock, SpatialGatingBlock
from torch import nn


@dataclass(frozen=True)
class TimmFamily:
    """One architecture. `accepts` says what its `act_layer` takes: "string" (and a class), "class" or "nothing"."""

    name: str
    create: Callable[..., nn.Module]
    accepts: str
    sites: int
    smooth: Mapping[str, int] = field(default_factory=dict)
    size: int = 32

    def build(self, activation: str | type | None = None) -> nn.Module:
        """The model with `activation` as its `act_layer`, or with its own activation."""
        torch.manual_seed(0)
        return enlarge(self.create(**({} if activation is None else {"act_layer": activation})))

    def inputs(self) -> dict[str, torch.Tensor]:
        """Two images."""
        return {"x": normal(2, 3, self.size, self.size)}


def _named(architecture: str, **sizes: Any) -> Callable[..., nn.Module]:
    return lambda **act: timm.create_model(architecture, num_classes=3, **sizes, **act)


def _mixer(**sizes: Any) -> Callable[..., nn.Module]:
    # timm's named mixers fix their depth and width.
    return lambda **act: MlpMixer(num_classes=3, img_size=32, patch_size=8, num_blocks=2, embed_dim=16, **sizes, **act)


_TINY_VIT = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3}

TIMM_FAMILIES: tuple[TimmFamily, ...] = (
    # the stem's, and in each of four basic blocks one inside and one behind the sum
    TimmFamily("timm-resnet18", _named("resnet18", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)), "string", 9),
    TimmFamily("timm-vit", _named("vit_tiny_patch16_224", **_TINY_VIT), "string", 2),
    TimmFamily("timm-deit", _named("deit_tiny_patch16_224", **_TINY_VIT), "string", 2),
    # four stages of one block
    TimmFamily("timm-convnext", _named("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), "string", 4),
    # the stem's and the head's, one in the first block and two in each of 15, and one in each block's
    # squeeze-and-excitation, whose 16 sigmoids stay
    TimmFamily("timm-efficientnet", _named("efficientnet_b0"), "string", 49, {"Sigmoid sigmoid": 16}),
    # the stem's, the last convolution's and the head's, and two in each of the eight blocks that do not ask for
    # ReLU by name; squeeze-and-excitation has ReLU and hard sigmoid
    TimmFamily("timm-mobilenetv3", _named("mobilenetv3_small_050"), "string", 19),
    # the stem's, and three in each of 13 blocks
    TimmFamily("timm-regnet", _named("regnetx_002"), "string", 40),
    # behind the first and the last normalization, two in each of four dense layers, one in each of three transitions
    TimmFamily("timm-densenet", _named("densenet121", growth_rate=4, block_config=(1, 1, 1, 1)), "string", 13),
    # per block one for tokens and one for channels
    TimmFamily("timm-mixer", _mixer(), "class", 4),
    TimmFamily("timm-resmlp", _mixer(mlp_ratio=4, block_layer=ResBlock), "class", 2),
    TimmFamily("timm-gmlp", _mixer(mlp_ratio=6, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp), "class", 2),
    # two stages of one block
    TimmFamily(
        "timm-swin",
        _named(
            "swin_tiny_patch4_window7_224",
            **{"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)},
        ),
        "nothing",
        2,
    ),
)
