"""Which axis of an activation's input counts channels."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from hf_lgelu.networks.outputs import ChannelAxes
from hf_lgelu.networks.run import forward_pre_hooks, run_example
from hf_lgelu.networks.sites import find_sites


class Between(nn.Module):
    """Layers, and what stands between them and a gate: a function of the layers' outputs for one input."""

    def __init__(self, between, *layers):
        super().__init__()
        self.layers, self.between, self.act = nn.ModuleList(layers), between, nn.GELU()

    def forward(self, x):
        return self.act(self.between(*(layer(x) for layer in self.layers)))


class Dropped(nn.Module):
    """Runs a layer and gives zeros like its input."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        self.layer(x)
        return torch.zeros_like(x)


def residual(layer):
    return Between(lambda a, b: a + b, nn.Identity(), layer)


def along(channels, width=3):
    return nn.Conv1d(5, channels, width)


IMAGES = torch.randn(2, 3, 8, 8)
TOKENS = torch.randn(2, 5, 6)
ROWS = torch.randn(2, 6)

# model, inputs, shape at the activation, channel axis
CASES = {
    "convolution": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU()), IMAGES, (2, 4, 6, 6), 1),
    "convolution 1d": (nn.Sequential(along(4), nn.GELU()), TOKENS, (2, 4, 4), 1),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.GELU()), IMAGES, (2, 4, 9, 9), 1),
    "batch norm": (nn.Sequential(nn.BatchNorm2d(3), nn.GELU()), IMAGES, (2, 3, 8, 8), 1),
    "group norm": (nn.Sequential(nn.GroupNorm(1, 3), nn.GELU()), IMAGES, (2, 3, 8, 8), 1),
    "pooling behind": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.GELU()), IMAGES, (2, 4, 3, 3), 1),
    "linear": (nn.Sequential(nn.Linear(6, 7), nn.GELU()), TOKENS, (2, 5, 7), 2),
    "linear of rows": (nn.Sequential(nn.Linear(6, 7), nn.GELU()), ROWS, (2, 7), 1),
    "transformers' Conv1D": (nn.Sequential(Conv1D(7, 6), nn.GELU()), TOKENS, (2, 5, 7), 2),
    "layer norm behind": (nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.GELU()), TOKENS, (2, 5, 7), 2),
    "residual sum of images": (residual(nn.Conv2d(3, 3, 1)), IMAGES, (2, 3, 8, 8), 1),
    "residual sum of tokens": (residual(nn.Linear(6, 6)), TOKENS, (2, 5, 6), 2),
    "reshaped to rows": (Between(lambda a: a.reshape(2, 30), nn.Linear(6, 6)), TOKENS, (2, 30), 1),
    "sum in place": (Between(lambda a, b: a.add_(b), nn.Identity(), along(5, 1)), TOKENS, (2, 5, 6), 1),
    "half of the channels": (Between(lambda a: a.chunk(2, dim=1)[1], along(8)), TOKENS, (2, 4, 4), 1),
    "weight normalization": (nn.Sequential(weight_norm(along(4)), nn.GELU()), TOKENS, (2, 4, 4), 1),
    "no batch": (nn.Sequential(along(4), nn.GELU()), TOKENS[0], (4, 4), 0),
    # What cannot be told.
    "transposed, one size": (Between(lambda a: a.transpose(1, 2), along(4)), TOKENS, (2, 4, 4), None),
    "transposed tokens": (Between(lambda a: a.mT + 1, nn.Linear(6, 7)), TOKENS, (2, 7, 5), None),
    "images, channels last": (Between(lambda a: a.permute(0, 2, 3, 1) + 1, nn.Conv2d(3, 4, 3)), IMAGES,
                              (2, 6, 6, 4), None),
    "beside a convolution": (Between(lambda a, b: a + b, nn.Linear(6, 6), Dropped(along(5))), TOKENS, (2, 5, 6), None),
    "the input itself": (nn.Sequential(nn.GELU()), IMAGES, (2, 3, 8, 8), None),
}  # fmt: skip


def seen_at(model, inputs):
    """{site: (shape of its input, channel axis)} at each site's first call."""
    axes, seen = ChannelAxes(model), {}
    names = {site.module: site.name for site in find_sites(model)}

    def look(module, args):
        seen.setdefault(names[module], (tuple(args[0].shape), axes.of(args[0])))

    with forward_pre_hooks(names, look), axes.watching():
        run_example(model, inputs)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_shape_and_channel_axis(name):
    model, inputs, shape, axis = CASES[name]
    (seen,) = seen_at(model.train(), inputs).values()
    assert seen == (shape, axis)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_attention_that_torch_would_compile_is_looked_through():
    class Flexible(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act = nn.Conv1d(16, 16, 1), nn.GELU()

        def forward(self, x):
            return self.act(self.conv(flex_attention(x, x, x)[:, 0].mT))

    assert seen_at(nn.Sequential(Flexible()), torch.randn(2, 1, 8, 16)) == {"0.act": ((2, 16, 8), 1)}
