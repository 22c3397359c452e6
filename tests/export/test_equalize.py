"""Equalized ranges: the same function to the bit, scales that are powers of two, and less lost in int8."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from small_networks import NETWORKS
from torch import nn

from hf_lgelu import export_onnx, quantize_onnx
from hf_lgelu.export.int8.equalize import equalize_ranges
from hf_lgelu.models.surgery import substitute_relu


def loud_mlp() -> nn.Sequential:
    """12-32-32-5, of which some units of either hidden layer are up to 60 times as loud as the others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    with torch.no_grad():
        for index, loudness in ((0, 60.0), (2, 20.0)):
            net[index].weight[:4] *= loudness
            net[index + 2].weight[:, :4] /= loudness
    return net


def rows(count: int = 256) -> torch.Tensor:
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(1))


class Convolutions(nn.Module):
    """Convolution, norm, ReLU, pooling, a grouped and a transposed convolution, and a sum that cannot be crossed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.act1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.grouped, self.act2 = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.LeakyReLU(0.1)
        self.up, self.act3 = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.ReLU()
        self.out = nn.Conv2d(6, 4, 1)
        self.norm.running_var.uniform_(0.5, 2.0)
        with torch.no_grad():
            self.norm.weight[0] = 40.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.act1(self.norm(self.first(x))), 2)
        x = self.up(self.act2(self.grouped(x)))
        return self.out(self.act3(x + x.roll(1, 1)))


def convolutions() -> tuple[nn.Module, dict]:
    return Convolutions(), {"x": torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


def transformer(name: str) -> tuple[nn.Module, dict]:
    model = NETWORKS[name].model()
    substitute_relu(model, kinds=("gelu", "silu"))
    return model, NETWORKS[name].inputs(4)


def output(model: nn.Module, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        found = model.eval()(**inputs)
    return found if isinstance(found, torch.Tensor) else found.logits


def int8_error(layer: nn.Linear, inputs: torch.Tensor) -> float:
    """Σ(int8 - float)²/Σ(float - mean)² of a layer's outputs, one after the other, in float64."""
    x = inputs.detach().double().numpy()
    least, most = min(x.min(), 0.0), max(x.max(), 0.0)
    step = (most - least) / 255
    zero = round(-least / step)
    coarse = (np.clip(np.rint(x / step), -zero, 255 - zero)) * step
    wrong = total = 0.0
    for row in layer.weight.double().numpy():
        size = np.abs(row).max() / 127
        wrong += ((coarse @ (np.rint(row / size) * size) - x @ row) ** 2).sum()
        total += (x @ row).var() * len(x)
    return wrong / total


@pytest.mark.parametrize("make", [*(partial(transformer, name) for name in ("gpt2", "llama")), convolutions])
def test_the_function_stays_to_the_bit(make):
    torch.manual_seed(0)
    model, inputs = make()
    before, weights = output(model, inputs), copy.deepcopy(model.state_dict())
    report = equalize_ranges(model, inputs)
    assert len(report.layers) == 2
    assert torch.equal(output(model, inputs), before)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, weights[name])}
    assert changed
    for name in changed:
        ratio = (model.state_dict()[name] / weights[name])[weights[name] != 0].double()
        assert torch.equal(ratio.log2(), ratio.log2().round()), f"{name} was not scaled by powers of two"


def test_errors_of_the_report_are_those_of_a_plain_loop():
    model, x = loud_mlp()[:3], rows()
    with torch.no_grad():
        before = int8_error(model[2], model[:2](x))
        (layer,) = equalize_ranges(model, x).layers
        after = int8_error(model[2], model[:2](x))
        loudest = model[:2](x).amax(0)
    assert (layer.name, layer.gate) == ("2", "1")
    assert layer.error == pytest.approx((before, after), rel=1e-3)
    assert after < before / 9
    assert layer.loudness[1] == pytest.approx(float(loudest.max() / loudest[loudest > 0].median()), rel=1e-5)


def test_units_that_never_fire_do_no_harm():
    net, x = loud_mlp(), rows()
    with torch.no_grad():
        net[0].bias[10] = -1e6
    before = output(net, {"input": x})
    report = equalize_ranges(net, x)
    assert torch.equal(output(net, {"input": x}), before)
    assert all(torch.isfinite(value).all() for value in net.state_dict().values())
    assert report.layers[0].error[1] < report.layers[0].error[0]


def test_the_file_in_int8_is_nearer(tmp_path):
    pytest.importorskip("onnxruntime")
    model, x = loud_mlp(), rows()
    errors = []
    for name in ("before", "after"):
        export_onnx(model, tmp_path / f"{name}.onnx", x)
        report = quantize_onnx(tmp_path / f"{name}.onnx", tmp_path / f"{name}-8.onnx", x, max_relative_error=10)
        errors.append(report.relative_error)
        equalize_ranges(model, x)
    assert errors[1] < errors[0] / 4


def test_what_cannot_be_rescaled_is_named():
    model, inputs = convolutions()
    report = equalize_ranges(model, inputs)
    assert set(report.left) == {"act3"}
    assert "comes from add" in report.left["act3"]
    assert "act3 left as it is" in str(report)


class Squeezing(nn.Module):
    """A gate on one value a channel, as in squeeze and excitation, before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reduce, self.act, self.expand = nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1)
        with torch.no_grad():
            self.reduce.weight[0] *= 50.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


def test_units_with_a_single_place_are_rescaled():
    model, inputs = Squeezing(), {"x": torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(1))}
    before = output(model, inputs)
    (layer,) = equalize_ranges(model, inputs).layers
    assert torch.equal(output(model, inputs), before)
    assert layer.error[1] < layer.error[0]


class BehindSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.act(x + self.one(x)))


class HiddenUse(nn.Module):
    """Computes with the memory of its first weight once more, and says so nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.net = loud_mlp()
        self.hidden = [self.net[0].weight.data]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x), x @ self.hidden[0].T


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), torch.ones(8, 4), "has no ReLU module"),
        (BehindSum(), torch.ones(8, 4), "no units of BehindSum.*\n  act: its input comes from add, which is no layer"),
        (HiddenUse(), rows(), "gives other outputs, and it is as it was"),
    ],
)
def test_what_cannot_be_rescaled_is_refused_as_it_was(model, inputs, said):
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=said):
        equalize_ranges(model, inputs)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_rows_that_are_no_rows_are_refused():
    with pytest.raises(ValueError, match="NaN or infinity"):
        equalize_ranges(loud_mlp(), torch.full((8, 12), torch.nan))
    with pytest.raises(ValueError, match="data holds no inputs"):
        equalize_ranges(loud_mlp(), [])


@pytest.mark.parametrize(
    ("name", "said"), [("2.weight", r"2\.weight holds some"), ("0.weight", "1 gives NaN or infinity")]
)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(name, said, number):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model.get_parameter(name).data[0] = number
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"{said}.*look at .*weights"):
        equalize_ranges(model, torch.rand(64, 4))
    assert all(torch.equal(value.nan_to_num(), weights[key].nan_to_num()) for key, value in model.state_dict().items())


def test_a_convolution_may_be_given_a_single_row():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 5, 3), nn.ReLU(), nn.Conv1d(5, 2, 3))
    with torch.no_grad():
        model[0].weight[0] *= 64
        model[0].bias[0] *= 64
    row, others = torch.randn(3, 20), torch.randn(4, 3, 20)
    before = model(others)
    equalize_ranges(model, row)
    assert torch.equal(model(others), before)  # powers of two
    loudest = model[1](model[0](row)).amax(1)
    assert loudest.max() / loudest.min() < 16


def test_ranges_come_from_all_batches():
    one, other, x = loud_mlp(), loud_mlp(), rows()
    equalize_ranges(one, x)
    equalize_ranges(other, [x[:100], x[100:]])
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
