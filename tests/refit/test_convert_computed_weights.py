"""Conversions of networks whose weights are no plain parameters, and of transposed convolutions."""

import pytest
import torch
from torch import nn
from torch.nn import utils

from hf_lgelu import LambdaGELU, convert_to_relu

NORMS = {
    "weight norm": utils.parametrizations.weight_norm,
    "spectral norm": utils.parametrizations.spectral_norm,
}


class Scaled(nn.Module):
    """As e3nn keeps its weights: x @ (w / sqrt(n))."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.w = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x):
        return x @ (self.w / len(self.w) ** 0.5)


class Held(nn.Module):
    """As onnx2torch keeps the weights of MatMul: a buffer (inputs, outputs)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.register_buffer("matrix", torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x):
        return x @ self.matrix


def dense(make):
    return nn.Sequential(make(8, 32), nn.SiLU(), make(32, 32), nn.GELU(), make(32, 4))


def images(last):
    return nn.Sequential(nn.Conv2d(2, 12, 3, padding=1), nn.SiLU(), last, nn.Flatten())


def rows(count=400):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(3))


def pictures(count=160):
    return torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(3))


MODELS = {
    **{
        f"{norm}, {kind}": (lambda put=put, kind=kind: normed(put, kind))
        for norm, put in NORMS.items()
        for kind in ("linear", "convolution")
    },
    "product": lambda: (dense(Scaled), rows()),
    "buffer": lambda: (dense(Held), rows()),
    "transposed": lambda: (images(nn.ConvTranspose2d(12, 3, 2, 2)), pictures()),
    "transposed, grouped": lambda: (images(nn.ConvTranspose2d(12, 6, 3, 2, 1, 1, groups=3)), pictures()),
    "transposed 1d": lambda: (
        nn.Sequential(nn.Conv1d(2, 12, 3), nn.SiLU(), nn.ConvTranspose1d(12, 1, 4, 2, 1)),
        torch.randn(160, 2, 20, generator=torch.Generator().manual_seed(3)),
    ),
    "transposed 3d before the gate, too": lambda: (
        nn.Sequential(nn.ConvTranspose3d(2, 10, 2, 2), nn.SiLU(), nn.ConvTranspose3d(10, 1, 2)),
        torch.randn(160, 2, 3, 3, 3, generator=torch.Generator().manual_seed(3)),
    ),
}


def normed(put, kind):
    if kind == "linear":
        model, data = dense(lambda inputs, outputs: put(nn.Linear(inputs, outputs))), rows()
    else:
        model, data = images(put(nn.Conv2d(12, 3, 3, 2))), pictures()
    model.train()
    for _ in range(20):  # the power iteration of spectral norm takes steps in training
        model(data)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and "weight" in dict(module.named_parameters(recurse=False)):
            nn.init.normal_(module.weight, std=0.3)
    return model.eval(), data


@pytest.mark.parametrize("name", MODELS)
def test_the_refit_is_nearer_and_the_result_reloads(name):
    torch.manual_seed(0)
    model, data = MODELS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = model(data)
    converted, report = convert_to_relu(model, data)
    assert report.held_out.refitted.relative_error < 0.5 * report.held_out.direct.relative_error
    assert not any(layer.is_unfit for layer in report.layers)
    assert {*model.state_dict()} == {*before}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(data), expected)

    fresh = MODELS[name]()[0]
    for site in report.gates:
        fresh.set_submodule(site, nn.ReLU())
    told = next((warning for warning in report.warnings if "is removed" in warning), "")
    assert bool(told) == name.startswith("spectral")
    plain = normed(lambda layer: layer, name.rpartition(" ")[2])[0] if told else None
    for layer in (each.removesuffix(".weight") for each in told.partition(":")[0].split(", ") if each):
        fresh.set_submodule(layer, plain.get_submodule(layer))
    fresh.load_state_dict(converted.state_dict(), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fresh.eval()(data), converted(data), rtol=1e-5, atol=1e-5)


def test_a_norm_stays_where_nothing_was_refitted():
    torch.manual_seed(0)
    norm = utils.parametrizations.spectral_norm
    model = nn.Sequential(norm(nn.Linear(8, 32)), nn.SiLU(), nn.Linear(32, 4)).eval()
    converted, report = convert_to_relu(model, rows())
    assert utils.parametrize.is_parametrized(converted[0], "weight")
    assert not any("is removed" in warning for warning in report.warnings)
    torch.testing.assert_close(converted[0](rows()), model[0](rows()), rtol=1e-5, atol=1e-5)


def test_a_norm_that_does_not_fit_a_wider_layer_is_removed_and_said():
    torch.manual_seed(0)
    norm = utils.parametrizations.spectral_norm
    model = nn.Sequential(norm(nn.Linear(8, 32)), nn.SiLU(), nn.Linear(32, 4)).eval()
    with torch.no_grad():
        model[2].weight *= 5
    converted, report = convert_to_relu(model, rows(), width=1.5)
    assert not utils.parametrize.is_parametrized(converted[0])
    assert any(warning.startswith("0.weight: the norm") for warning in report.warnings)


def test_a_gate_with_a_parametrization_is_no_norm_of_a_map():
    torch.manual_seed(0)
    gate = utils.parametrize.register_parametrization(LambdaGELU(), "raw_hardness", nn.Identity())
    model = nn.Sequential(nn.Linear(8, 32), gate, nn.Linear(32, 4)).eval()
    converted, report = convert_to_relu(model, rows())
    assert report.held_out.refitted.kl < 0.5 * report.held_out.direct.kl
    assert isinstance(converted[1], nn.ReLU)
    assert report.warnings == ()


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore:.*weight_norm` is deprecated")
def test_a_norm_by_a_hook_is_refused_and_converts_when_it_is_removed(norm):
    model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), getattr(utils, norm)(nn.Linear(32, 4))).eval()
    with pytest.raises(ValueError, match=f"weight of 2.*remove_{norm}"):
        convert_to_relu(model, rows())
    getattr(utils, f"remove_{norm}")(model[2])
    convert_to_relu(model, rows())
