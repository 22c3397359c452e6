"""Depthwise networks with constants between maps and gates: the same networks with the constants folded by hand."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_lgelu import ConversionRefusedError, convert_to_relu
from hf_lgelu.refit.carry import KINKS
from hf_lgelu.refit.layerwise import _at_nearest_kinks


class Affine(nn.Module):
    """A scale and an offset, for each channel or for all (PP-LCNetV3 has one of each, learned)."""

    def __init__(self, scale, offset, is_learned=True):
        super().__init__()
        for name, value in (("scale", scale), ("offset", offset)):
            if is_learned:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

    def forward(self, x):
        return self.offset + x * self.scale


def drawn(*shape):
    return torch.rand(*shape) + 0.5


def depthwise(padding=1, after=None, is_learned=True):
    """(a network with constants around its first gate, the same network without)."""
    torch.manual_seed(0)
    before = Affine(drawn(6, 1, 1) * torch.tensor([1.0, -1.0] * 3).view(6, 1, 1), drawn(1) - 1, is_learned)
    body = nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), before, nn.Hardswish(), after or nn.Identity(),
        nn.Conv2d(6, 6, 3, padding=padding, groups=6), nn.Hardswish(), nn.Conv2d(6, 8, 1), nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    with torch.no_grad():
        for value in (body[1].weight, body[1].bias, body[1].running_mean, body[1].running_var):
            value.copy_(drawn(6))
    body = body.double().eval()
    folded = copy.deepcopy(body)
    with torch.no_grad():
        norm, scale = folded[1], before.scale.flatten()
        norm.bias.copy_(norm.bias * scale + before.offset)
        norm.weight.mul_(scale)
        folded[2] = nn.Identity()
        if after is not None:
            folded[5].bias.add_((folded[5].weight * after.offset).sum((1, 2, 3)))
            folded[5].weight.mul_(after.scale)
            folded[4] = nn.Identity()
    return body, folded


def pictures(count):
    return 2 * torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    ("constants", "effort"), [("parameters", "refit"), ("buffers", "place"), ("after the gate, too", "refit")]
)
def test_constants_around_a_gate_are_part_of_the_layer(constants, effort):
    after = Affine(torch.tensor(1.7), torch.tensor(-0.4)).double() if constants.startswith("after") else None
    model, folded = depthwise(0 if after else 1, after, constants != "buffers")
    torch.testing.assert_close(model(pictures(4)), folded(pictures(4)))
    (found, report), (wanted, by_hand) = (
        convert_to_relu(each, pictures(100), effort=effort) for each in (model, folded)
    )
    assert [layer.choice for layer in report.layers] == [layer.choice for layer in by_hand.layers]
    torch.testing.assert_close(found(pictures(4)), wanted(pictures(4)), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(found[1].bias, model[1].bias, rtol=0.01)  # kinks were chosen
    for name, value in model[2].state_dict().items():
        assert torch.equal(found[2].state_dict()[name], value)


def test_pictures_that_are_not_finite_are_refused_before_a_kink_is_chosen():
    model, _ = depthwise()
    inputs = pictures(100)
    inputs[::3, 0] = float("nan")
    with pytest.raises(ConversionRefusedError, match="5 is not finite"):
        convert_to_relu(model, inputs)


def test_a_depthwise_layer_that_no_batch_reaches_has_no_sums():
    layer = SimpleNamespace(depthwise_gate=object(), name="unreached", has_intercept=True)
    assert _at_nearest_kinks(nn.Identity(), layer, [[] for _ in KINKS]) == []
