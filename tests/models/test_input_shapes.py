"""What shape reaches an activation and which axis counts channels."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.parametrizations import weight_norm
from transformers.pytorch_utils import Conv1D

from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.models.input_shapes import site_input_shapes
from hf_lgelu.models.sites import find_sites


class Residual(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.act = nn.GELU()

    def forward(self, x):
        return self.act(x + self.body(x))


class Between(nn.Module):
    """Layers, and what stands between them and a gate: a function of the layers' outputs for one input."""

    def __init__(self, between, *layers):
        super().__init__()
        self.layers, self.between, self.act = nn.ModuleList(layers), between, nn.GELU()

    def forward(self, x):
        return self.act(self.between(*(layer(x) for layer in self.layers)))


class Reshaped(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.shape = shape
        self.act = nn.GELU()

    def forward(self, x):
        return self.act(x.reshape(self.shape))


class Dropped(nn.Module):
    """Runs a layer and gives zeros like its input."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        self.layer(x)
        return torch.zeros_like(x)


def along(channels, width=3):
    return nn.Conv1d(5, channels, width)


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


WEIGHT = nn.Parameter(torch.randn(7, 6))
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
    "linear": (nn.Sequential(nn.Linear(6, 7), nn.GELU()), TOKENS, (2, 5, 7), 2),
    "linear of rows": (nn.Sequential(nn.Linear(6, 7), nn.GELU()), ROWS, (2, 7), 1),
    "linear, channels last": (nn.Sequential(nn.Linear(8, 7), nn.GELU()), IMAGES, (2, 3, 8, 7), 3),
    "transformers' Conv1D": (nn.Sequential(Conv1D(7, 6), nn.GELU()), TOKENS, (2, 5, 7), 2),
    "layer norm": (nn.Sequential(nn.LayerNorm(6), nn.GELU()), TOKENS, (2, 5, 6), 2),
    "residual sum of images": (Residual(nn.Conv2d(3, 3, 1)), IMAGES, (2, 3, 8, 8), 1),
    "residual sum of tokens": (Residual(nn.Linear(6, 6)), TOKENS, (2, 5, 6), 2),
    "reshaped": (nn.Sequential(nn.Linear(6, 6), Reshaped(2, 30)), TOKENS, (2, 30), 1),
    "sum of convolutions 1d": (Between(lambda a, b: a + b, along(4), nn.Conv1d(5, 4, 3)), TOKENS, (2, 4, 4), 1),
    "sum with the input": (Between(lambda a, b: a + b, nn.Identity(), along(5, 1)), TOKENS, (2, 5, 6), 1),
    "sum in place": (Between(lambda a, b: a.add_(b), nn.Identity(), along(5, 1)), TOKENS, (2, 5, 6), 1),
    "scaled by channel": (Between(lambda a: a * torch.rand(4, 1) - 1, along(4)), TOKENS, (2, 4, 4), 1),
    "weighted by frame": (Between(torch.mul, along(4), along(1)), TOKENS, (2, 4, 4), 1),
    "slice": (Between(lambda a: a[:, :, :-1], along(4)), TOKENS, (2, 4, 3), 1),
    "half of the channels": (Between(lambda a: a.chunk(2, dim=1)[1], along(8)), TOKENS, (2, 4, 4), 1),
    "transpose": (Between(lambda a: a.transpose(1, 2), along(4)), TOKENS, (2, 4, 4), 2),
    "there and back": (Between(lambda a: norm(a.mT).mT, along(4)), TOKENS, (2, 4, 4), 1),
    "permuted": (Between(lambda a: a.permute(2, 0, 1), along(4)), TOKENS, (4, 2, 4), 2),
    "linear, transposed": (
        Between(lambda a, b: a.movedim(-1, 1) + 0 * b.sum(), nn.Linear(6, 7), along(1)),
        TOKENS,
        (2, 7, 5),
        1,
    ),
    "padded and pooled": (Between(lambda a: F.avg_pool1d(F.pad(a, (1, 1)), 2), along(4)), TOKENS, (2, 4, 3), 1),
    "side by side": (Between(lambda a, b: torch.cat([a, b], 1), along(4), along(3)), TOKENS, (2, 7, 4), 1),
    "mean over the length": (Between(lambda a: a.mean(-1), along(4)), TOKENS, (2, 4), 1),
    "one frame": (Between(lambda a: a[..., 0], along(4)), TOKENS, (2, 4), 1),
    "an axis more": (Between(lambda a: a[:, None], along(4)), TOKENS, (2, 1, 4, 4), 2),
    "weight normalization": (nn.Sequential(weight_norm(along(4)), nn.GELU()), TOKENS, (2, 4, 4), 1),
    "no batch": (nn.Sequential(along(4), nn.GELU()), TOKENS[0], (4, 4), 0),
    "pixels in a row": (Between(lambda a: a.flatten(2), nn.Conv2d(3, 4, 3)), IMAGES, (2, 4, 36), 1),
    "patches": (Between(lambda a: a.flatten(2).mT, nn.Conv2d(3, 4, 4, 4)), IMAGES, (2, 4, 4), 2),
    "sum of images, channels last": (
        Between(lambda a: a.permute(0, 2, 3, 1) + 1, nn.Conv2d(3, 4, 3)),
        IMAGES,
        (2, 6, 6, 4),
        3,
    ),
    "tokens beside a convolution 1d": (
        Between(lambda a, b: a + b, nn.Linear(6, 6), Dropped(along(4))),
        TOKENS,
        (2, 5, 6),
        2,
    ),
    "recurrent beside a convolution 1d": (
        Between(lambda a, b: a[0] + 0 * b.sum(), nn.GRU(6, 7, batch_first=True), along(4)),
        TOKENS,
        (2, 5, 7),
        2,
    ),
    "function with a weight": (
        Between(lambda a, b: F.linear(a, WEIGHT) + 0 * b.sum(), nn.Identity(), along(4)),
        TOKENS,
        (2, 5, 7),
        2,
    ),
    "behind another gate": (Between(lambda a: LambdaGELU()(a)[..., 1:], along(4)), TOKENS, (2, 4, 3), 1),
    # What cannot be followed: either axis may be meant.
    "1d, reshaped": (Between(lambda a: a.reshape(2, 2, 8), along(4)), TOKENS, (2, 2, 8), None),
    "1d, attention": (Between(lambda a: a @ a.mT, along(4)), TOKENS, (2, 4, 4), None),
    "1d, neither agrees": (Between(lambda a, b: a + b[..., :4], along(5), nn.Linear(6, 6)), TOKENS, (2, 5, 4), None),
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


def test_attention_that_torch_would_compile_is_looked_through():
    class Flexible(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act = nn.Conv1d(16, 16, 1), nn.GELU()

        def forward(self, x):
            return self.act(self.conv(flex_attention(x, x, x)[:, 0].mT))

    model = nn.Sequential(Flexible())
    assert site_input_shapes(model, find_sites(model), torch.randn(2, 1, 8, 16)) == {"0.act": ((2, 16, 8), 1)}


def test_a_place_that_is_not_asked_for_is_not_seen():
    gelu = nn.GELU()
    model = nn.Sequential(nn.Linear(6, 7), gelu, nn.Linear(7, 8), gelu, nn.Linear(8, 9), gelu)
    sites = [site for site in find_sites(model) if site.name == "3"]
    assert site_input_shapes(model, sites, ROWS) == {"3": ((2, 8), 1)}
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
    assert site_input_shapes(model, find_sites(model), ROWS) == {"0.0": ((2, 6), 1)}


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
