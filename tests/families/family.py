"""The record of one model family, its example inputs, and what a model is compared by.

Neither this file nor the tables import hf_lgelu: the process that loads the ReLU models must not have it.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn


@dataclass(frozen=True)
class Family:
    """One architecture of transformers in a tiny size.

    prefix, head: the model class is `prefix + head`, the config class `prefix + "Config"`.
    keys: {dotted config key: value with {} for the activation's name}. Empty: only surgery gets λ-GELU in.
    sites: λ-GELU sites, counted by hand from the architecture.
    smooth: {"module class operation": calls of one forward} that are left when every λ-GELU is a ReLU.
    gate: the λ-gate that surgery puts in the place of what the family calls "gelu".
    relu_keys: the keys that say ReLU where `keys` is empty; empty as well: no config says ReLU.
    """

    name: str
    prefix: str
    head: str
    sizes: Mapping[str, Any]
    keys: Mapping[str, str]
    inputs: Callable[[], dict[str, torch.Tensor]]
    sites: int
    smooth: Mapping[str, int] = field(default_factory=dict)
    relu_keys: Mapping[str, Any] = field(default_factory=dict)
    gate: str = "lambda_gelu"

    def build(self, activation: str = "gelu") -> nn.Module:
        """The model with `activation` at every key."""
        torch.manual_seed(0)
        sizes = copy.deepcopy(dict(self.sizes))
        for key, template in self.keys.items():
            put(sizes, key, template.format(activation))
        config = getattr(transformers, f"{self.prefix}Config")(**sizes)
        return enlarge(self.model_class(config))

    @property
    def model_class(self) -> type:
        """The model's class."""
        return getattr(transformers, self.prefix + self.head)

    @property
    def relu_config(self) -> dict[str, Any]:
        """{dotted key: value} of the config once every site is a ReLU; empty where no config says so."""
        return {key: template.format("relu") for key, template in self.keys.items()} or dict(self.relu_keys)


def put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `tree[a][b] = value` for the key "a.b"."""
    *path, last = dotted.split(".")
    for step in path:
        tree = tree.setdefault(step, {})
    tree[last] = value


def get(tree: Mapping[str, Any], dotted: str) -> Any:
    """`tree[a][b]` for the key "a.b"."""
    return functools.reduce(lambda node, step: node[step], dotted.split("."), tree)


@torch.no_grad()
def enlarge(model: nn.Module) -> nn.Module:
    """Draw the weights anew, large: with the usual initial values GELU and ReLU hardly differ."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("raw_hardness"):
            continue
        if parameter.dim() < 2:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0, 1.5 / parameter[0].numel() ** 0.5, generator=generator)
    return model.eval()


def rewrite_tensors(folder, change, name="model.safetensors"):
    """Have a checkpoint hold what `change` makes of its {name: tensor}, in place or as another dict."""
    file = folder / name
    tensors = load_file(file)
    changed = change(tensors)
    save_file(changed if isinstance(changed, dict) else tensors, file, metadata={"format": "pt"})


def main_output(output: Any) -> torch.Tensor:
    """The tensor that a model is run for."""
    if isinstance(output, torch.Tensor):
        return output
    names = ("logits", "logits_per_image", "prediction_outputs")
    main = next((output[name] for name in names if name in output), output[0])
    return main[0] if isinstance(main, tuple) else main  # MGP-STR reads characters, and two kinds of word pieces


@torch.no_grad()
def logits_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the model computes in eval mode."""
    return main_output(model.eval()(**inputs))


def normal(*shape: int) -> torch.Tensor:
    """Standard normal numbers, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def tokens() -> dict[str, torch.Tensor]:
    """Two sentences of six tokens out of 32; ids below 3 are special."""
    return {"input_ids": torch.arange(12).reshape(2, 6) * 7 % 29 + 3}


def tokens_with_decoder() -> dict[str, torch.Tensor]:
    """The same, and three tokens each for a decoder."""
    return {**tokens(), **decoder_tokens()}


def decoder_tokens() -> dict[str, torch.Tensor]:
    """Three tokens for each of two sentences."""
    return {"decoder_input_ids": torch.tensor([[2, 9, 4], [2, 5, 11]])}


def pixels() -> dict[str, torch.Tensor]:
    """Two images of 16 x 16."""
    return {"pixel_values": normal(2, 3, 16, 16)}


def large_pixels() -> dict[str, torch.Tensor]:
    """Two images of 32 x 32."""
    return {"pixel_values": normal(2, 3, 32, 32)}


def pixels_and_tokens() -> dict[str, torch.Tensor]:
    """Two images and two sentences."""
    return {**pixels(), **tokens()}
