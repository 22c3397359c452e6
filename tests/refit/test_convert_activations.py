"""Whatever a network's activations are, the refit is far nearer to it than ReLU put in their place."""

import pytest
import torch
from small_networks import MemorySwish
from torch import nn
from torch.nn import functional as F

from hf_lgelu import convert_to_relu
from hf_lgelu.models.surgery import TemporaryRelu
from hf_lgelu.networks.sites import KINDS, find_sites
from hf_lgelu.refit.config import ConversionConfig


class OwnSwish(nn.Module):
    """A repository's own, with a slope that was learned."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor([1.3]))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


class Block(nn.Module):
    """A block that keeps its activation as a function."""

    def __init__(self, act) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(12, 24), act, nn.Linear(24, 5)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def slopes() -> nn.PReLU:
    prelu = nn.PReLU(24)
    nn.init.uniform_(prelu.weight, 0.1, 0.5)
    return prelu


ACTIVATIONS = {
    "OwnSwish": (OwnSwish, ()),
    "MemorySwish": (MemorySwish, ()),
    "Hardswish": (nn.Hardswish, ()),
    "LeakyReLU": (lambda: nn.LeakyReLU(0.3), ()),
    "PReLU": (slopes, ()),
    "SELU": (nn.SELU, ()),
    "CELU": (lambda: nn.CELU(0.5), ()),
    "Softplus": (nn.Softplus, ()),
    "Tanh": (nn.Tanh, ("tanh",)),
    "gelu": (lambda: F.gelu, ()),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation_is_converted(name):
    make, kinds = ACTIVATIONS[name]
    torch.manual_seed(0)
    model, x = Block(make()).eval(), torch.randn(600, 12)
    with torch.no_grad():
        model.first.weight.mul_(3)
        expected = model(x)
    held = model.act
    converted, report = convert_to_relu(model, x[:500], options=ConversionConfig(kinds=kinds or None))
    assert type(converted.act) is nn.ReLU
    assert report.gates == {"act": name}
    assert find_sites(converted, KINDS) == []
    assert model.act is held
    with torch.no_grad(), TemporaryRelu(model, kinds=KINDS).applied():
        swapped = model(x[500:])
    with torch.no_grad():
        near, far = ((out - expected[500:]).square().mean() for out in (converted(x[500:]), swapped))
    assert near < 0.5 * far
    assert report.held_out.refitted.relative_error < report.held_out.direct.relative_error


class Padded(nn.Module):
    """torch's encoder, whose fused path makes nested tensors of padded sequences."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, activation="gelu", batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(16, 4)

    def forward(self, x, attention_mask):
        return {"logits": self.head(self.encoder(x, src_key_padding_mask=attention_mask == 0)[:, 0])}


def test_torchs_encoder_with_padding_runs_its_fused_kernel_right_after_the_conversion():
    mask = (torch.arange(3) < torch.arange(200)[:, None] % 3 + 1).long()
    model, x = Padded().eval(), {"x": torch.randn(200, 3, 16), "attention_mask": mask}
    expected = model(**x)["logits"].detach()
    converted, report = convert_to_relu(model, x)
    held, before = converted.encoder.layers[0], model.encoder.layers[0]
    assert (type(held.activation), held.activation_relu_or_gelu) == (nn.ReLU, 1)
    with torch.no_grad():
        fused, again = converted(**x)["logits"], model(**x)["logits"]
    torch.testing.assert_close(fused, converted(**x)["logits"].detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-5)
    assert (before.activation, before.activation_relu_or_gelu) == (F.gelu, 2)
    assert report.gates == {"encoder.layers.0.activation": "gelu"}
    assert report.held_out.refitted.value < report.held_out.direct.value
