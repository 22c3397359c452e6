"""Families whose own activation is another self-gate than the erf GELU, in tiny sizes, with that activation or another.

This file imports no hf_lgelu: run as a program, it loads the ReLU models of a folder and writes what they compute.
Usage: self_gated_families.py FOLDER. Each subfolder has the name of a row, and holds its checkpoint and inputs.pt.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from family import enlarge, logits_of, normal
from safetensors.torch import load_file
from torch import nn

_CAUSAL = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 32},
    **{"num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1},
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class SelfGated:
    """One architecture.

    gate: the row of GATES whose λ = 1 its own activation is.
    sites: counted by hand.
    sizes: of its config; empty for a module that is built by `create(act_layer)`.
    key: the config's, with the family's own value.
    """

    name: str
    gate: str
    sites: int
    sizes: Mapping[str, Any] = field(default_factory=dict)
    key: tuple[str, str] = ("hidden_act", "silu")
    create: Callable[[type], nn.Module] | None = None

    def build(self) -> nn.Module:
        """With its own activation, in evaluation mode."""
        torch.manual_seed(0)
        if self.create is not None:
            return enlarge(self.create(nn.SiLU)).eval()
        config = getattr(transformers, f"{self.name}Config")(**self.sizes, **{self.key[0]: self.key[1]})
        return enlarge(self.model_class(config)).eval()

    @property
    def model_class(self) -> type:
        """Of a row with sizes."""
        return getattr(transformers, f"{self.name}ForCausalLM")

    def inputs(self) -> dict[str, torch.Tensor]:
        """Two sequences or two images."""
        if self.create is not None:
            return {"x": normal(2, 3, 64, 64)}
        return {"input_ids": torch.arange(3, 15).reshape(2, 6)}

    def read(self, folder: Path) -> nn.Module:
        """The ReLU model."""
        if self.create is None:
            return self.model_class.from_pretrained(folder)
        model = self.create(nn.ReLU).eval()
        model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
        return model


class _Convolution(nn.Module):
    def __init__(self, channels: int, out: int, stride: int, act_layer: type) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.act = act_layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.bn(self.conv(x)))


class DetectorShaped(nn.Module):
    """As YOLO's: convolutions with SiLU, a block that splits, adds and joins, and one output map of boxes a scale."""

    def __init__(self, act_layer: type) -> None:
        super().__init__()
        self.stem, self.down = _Convolution(3, 8, 2, act_layer), _Convolution(8, 16, 2, act_layer)
        self.inner = nn.ModuleList(_Convolution(8, 8, 1, act_layer) for _ in range(2))
        self.join, self.up = _Convolution(24, 16, 1, act_layer), nn.Upsample(scale_factor=2)
        self.neck = _Convolution(24, 8, 1, act_layer)
        self.heads = nn.ModuleList((nn.Conv2d(16, 7, 1), nn.Conv2d(8, 7, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.stem(x)
        first, second = self.down(fine).chunk(2, 1)
        third = second + self.inner[1](self.inner[0](second))
        coarse = self.join(torch.cat([first, second, third], 1))
        neck = self.neck(torch.cat([self.up(coarse), fine], 1))
        return torch.cat([self.heads[0](coarse).flatten(2), self.heads[1](neck).flatten(2)], 2)


def _timm(name: str) -> Callable[[type], nn.Module]:
    return lambda act_layer: timm.create_model(name, num_classes=3, act_layer=act_layer)


FAMILIES: dict[str, SelfGated] = {
    family.name: family
    for family in (
        SelfGated("Llama", "lambda_silu", 2, _CAUSAL),
        SelfGated("Mistral", "lambda_silu", 2, _CAUSAL),
        SelfGated("Qwen2", "lambda_silu", 2, _CAUSAL),
        SelfGated(*("Gemma", "lambda_gelu_tanh", 2, {**_CAUSAL, "head_dim": 8}, ("hidden_act", "gelu_pytorch_tanh"))),
        SelfGated("Phi", "lambda_gelu_tanh", 2, _CAUSAL, ("hidden_act", "gelu_new")),
        SelfGated("efficientnet", "lambda_silu", 11, create=_timm("test_efficientnet")),
        SelfGated("mobilevit", "lambda_silu", 34, create=_timm("mobilevit_xxs")),
        SelfGated("detector", "lambda_silu", 6, create=DetectorShaped),
    )
}


def main(root: Path) -> None:
    torch.set_num_threads(1)
    logits = {
        folder.name: logits_of(FAMILIES[folder.name].read(folder), torch.load(folder / "inputs.pt"))
        for folder in sorted(path for path in root.iterdir() if path.is_dir())
    }
    modules = [name for name in sys.modules if name.partition(".")[0] == "hf_lgelu"]
    torch.save({"modules": modules, "logits": logits}, root / "logits.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
