"""Which axis of a map without a name counts classes."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from hf_lgelu.networks.outputs import OutputReader


class After(nn.Module):
    """Layers, and what comes after them: a function of the layers' outputs for one input."""

    def __init__(self, after, *layers):
        super().__init__()
        self.layers, self.after = nn.ModuleList(layers), after

    def forward(self, x):
        return self.after(*(layer(x) for layer in self.layers))


def residual(layer):
    return After(lambda a, b: a + b, nn.Identity(), layer)


def along(channels, width=3):
    return nn.Conv1d(5, channels, width)


IMAGES = torch.randn(2, 3, 8, 8)
TOKENS = torch.randn(2, 5, 6)

# model, inputs, class axis
CASES = {
    "convolution": (nn.Conv2d(3, 4, 3), IMAGES, 1),
    "convolution 1d": (along(4, 2), TOKENS, 1),
    "transposed": (nn.ConvTranspose2d(3, 4, 2), IMAGES, 1),
    "batch norm behind": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), IMAGES, 1),
    "pooling behind": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)), IMAGES, 1),
    "linear": (nn.Linear(6, 7), TOKENS, 2),
    "linear on images": (After(lambda a: a.flip(1), nn.Linear(8, 4)), IMAGES, 3),
    "transformers' Conv1D": (Conv1D(7, 6), TOKENS, 2),
    "layer norm behind": (nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7)), TOKENS, 2),
    "residual sum of images": (residual(nn.Conv2d(3, 3, 1)), IMAGES, 1),
    "residual sum of tokens": (residual(nn.Linear(6, 6)), TOKENS, 2),
    "weight normalization": (weight_norm(along(4, 2)), TOKENS, 1),
    # What cannot be told.
    "transposed, one size": (After(lambda a: a.transpose(1, 2), along(4)), TOKENS, None),
    "transposed tokens": (After(lambda a: a.mT + 1, nn.Linear(6, 7)), TOKENS, None),
    "images, channels last": (After(lambda a: a.permute(0, 2, 3, 1), nn.Conv2d(3, 4, 3)), IMAGES, None),
    "beside a convolution": (After(lambda a, b: a + b.sum(), nn.Linear(6, 6), along(5)), TOKENS, None),
    "the input itself": (nn.Identity(), IMAGES, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_classes_are_last_and_a_map_whose_layer_does_not_tell_holds_values(name):
    model, inputs, axis = CASES[name]
    outputs = OutputReader(model)(inputs)
    with torch.no_grad():
        given = model.eval()(inputs)
    usual = 1 if given.ndim > 3 else -1
    assert torch.equal(outputs.first, given.movedim(usual if axis is None else axis, -1))
    assert outputs.kinds == {"": "values" if axis is None else "scores"}
    assert not any(module._forward_hooks for module in model.modules())
