"""What shape reaches an activation and which axis counts channels."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_lgelu.models.input_shapes import site_input_shapes
from hf_lgelu.models.sites import find_sites


class Residual(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.act = nn.GELU()

    def forward(self, x):
        return self.act(x + self.body(x))


class Reshaped(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.shape = shape
        self.act = nn.GELU()

    def forward(self, x):
        return self.act(x.reshape(self.shape))


IMAGES = torch.randn(2, 3, 8, 8)
TOKENS = torch.randn(2, 5, 6)
ROWS = torch.randn(2, 6)

# model, inputs, shape at the activation, channel axis
CASES = {
    "convolution": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU()), IMAGES, (2, 4, 6, 6), 1),
    "convolution 1d": (nn.Sequential(nn.Conv1d(5, 4, 3), nn.GELU()), TOKENS, (2, 4, 4), 1),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.GELU()), IMAGES, (2, 4, 9, 9), 1),
    "batch norm": (nn.Sequential(nn.BatchNorm2d(3), nn.GELU()), IMAGES, (2, 3, 8, 8), 1),
    "batch norm of rows": (nn.Sequential(nn.BatchNorm1d(6), nn.GELU()), ROWS, (2, 6), 1),
    "group norm": (nn.Sequential(nn.GroupNorm(1, 3), nn.GELU()), IMAGES, (2, 3, 8, 8), 1),
    "identity behind": (nn.Sequential(nn.Conv1d(5, 4, 3), nn.Identity(), nn.GELU()), TOKENS, (2, 4, 4), 1),
    "dropout behind": (nn.Sequential(nn.Conv1d(5, 4, 3), nn.Dropout(0.5), nn.GELU()), TOKENS, (2, 4, 4), 1),
    "pooling behind": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.GELU()), IMAGES, (2, 4, 3, 3), 1),
    "linear": (nn.Sequential(nn.Linear(6, 7), nn.GELU()), TOKENS, (2, 5, 7), -1),
    "linear of rows": (nn.Sequential(nn.Linear(6, 7), nn.GELU()), ROWS, (2, 7), -1),
    "linear, channels last": (nn.Sequential(nn.Linear(8, 7), nn.GELU()), IMAGES, (2, 3, 8, 7), -1),
    "transformers' Conv1D": (nn.Sequential(Conv1D(7, 6), nn.GELU()), TOKENS, (2, 5, 7), -1),
    "layer norm": (nn.Sequential(nn.LayerNorm(6), nn.GELU()), TOKENS, (2, 5, 6), -1),
    "residual sum of images": (Residual(nn.Conv2d(3, 3, 1)), IMAGES, (2, 3, 8, 8), 1),
    "residual sum of tokens": (Residual(nn.Linear(6, 6)), TOKENS, (2, 5, 6), -1),
    "reshaped": (nn.Sequential(nn.Linear(6, 6), Reshaped(2, 30)), TOKENS, (2, 30), -1),
    "the input itself": (nn.Sequential(nn.GELU()), IMAGES, (2, 3, 8, 8), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_shape_and_channel_axis(name):
    model, inputs, shape, axis = CASES[name]
    (seen,) = site_input_shapes(model.train(), find_sites(model), inputs).values()
    assert seen == (shape, axis)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_one_module_at_several_places_is_seen_at_each_and_stays_one():
    gelu = nn.GELU()
    model = nn.Sequential(nn.Linear(6, 7), gelu, nn.Linear(7, 8), gelu, nn.Linear(8, 9), gelu)
    seen = site_input_shapes(model, find_sites(model), ROWS)
    assert {name: shape for name, (shape, _) in seen.items()} == {"1": (2, 7), "3": (2, 8), "5": (2, 9)}
    assert [model[i] for i in (1, 3, 5)] == [gelu] * 3


def test_a_place_that_is_not_asked_for_is_not_seen():
    gelu = nn.GELU()
    model = nn.Sequential(nn.Linear(6, 7), gelu, nn.Linear(7, 8), gelu, nn.Linear(8, 9), gelu)
    sites = [site for site in find_sites(model) if site.name == "3"]
    assert site_input_shapes(model, sites, ROWS) == {"3": ((2, 8), -1)}
    assert [model[i] for i in (1, 3, 5)] == [gelu] * 3


def test_one_module_at_several_places_is_put_back_after_an_error():
    gelu = nn.GELU()
    model = nn.Sequential(nn.Linear(6, 7), gelu, nn.Linear(3, 3), gelu)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        site_input_shapes(model, find_sites(model), ROWS)
    assert model[1] is gelu
    assert model[3] is gelu


def test_a_layer_that_is_called_twice_is_seen_at_its_first_call():
    layer = nn.Sequential(nn.GELU())
    model = nn.Sequential(layer, nn.Linear(6, 9), layer)
    assert site_input_shapes(model, find_sites(model), ROWS) == {"0.0": ((2, 6), -1)}


def test_a_site_that_is_never_reached_is_named():
    class Unreached(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.GELU(), nn.GELU()

        def forward(self, x):
            return self.used(x)

    model = Unreached()
    with pytest.raises(ValueError, match="never reach unused;"):
        site_input_shapes(model, find_sites(model), ROWS)
