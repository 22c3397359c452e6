"""convert_to_relu against a refit that runs everything again for every layer and solves dense systems."""

import pytest
import torch
from dense_oracle import refit
from refit_nets import NETS
from small_networks import convert_with
from torch import nn

from hf_lgelu.networks.batches import read_batches
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.samples import read_samples


def planned(model, inputs, batch_size):
    return deal_folds(
        read_samples(read_batches(inputs, batch_size=batch_size, model=model), model=model),
        OutputReader(model),
        batch_size=batch_size,
    )


def assert_close(actual, expected, tolerance=1e-8):
    actual, expected = actual.detach(), expected.detach()
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(1.0, float(expected.abs().max())))


def assert_error(actual, expected):
    assert (actual is None) == (expected is None)
    assert actual is None or actual == pytest.approx(expected, rel=1e-7)


# Without cross-validation: networks whose rows are read as they are, and as patches.
FIXED = {"mlp", "convolutions"}
CASES = [
    pytest.param(net, units, id=f"{net.name}-{units}", marks=marks)
    for net in NETS
    for units, marks in ((96, ()), (40 if len(net.shape) == 1 else 15, () if net.name in FIXED else pytest.mark.slow))
]


@pytest.mark.parametrize(("net", "units"), CASES)
def test_weights_are_those_of_dense_least_squares(net, units, monkeypatch):
    monkeypatch.setattr("hf_lgelu.refit.carry.LEAST_POSITIONS", 600)  # fewer than there are: some are drawn
    model, inputs = net.model(), net.inputs(units=units)
    converted, report = convert_with(model, inputs, batch_size=16)
    expected, chosen = refit(model, net.steps, planned(model, inputs, 16))
    assert [layer.layers for layer in report.layers] == [step.maps for step in net.steps]
    for step, layer, choice in zip(net.steps, report.layers, chosen, strict=True):
        assert (layer.choice, layer.strength, layer.rows) == (choice.choice, choice.strength, choice.rows)
        for name in ("error_before", "error_after"):
            assert_error(getattr(layer, name), getattr(choice, name))
        for name in step.maps:
            assert_close(converted.get_submodule(name).weight, expected.get_submodule(name).weight)
    fresh = net.inputs(seed=77)
    with torch.no_grad():
        assert_close(converted(fresh), expected(fresh))
        # The refit is no small matter on these nets, or the comparison would be none.
        assert (converted(fresh) - model(fresh)).abs().max() > 1e-3
    assert any(layer.choice == "refit" for layer in report.layers)
    assert not any(isinstance(module, nn.GELU | nn.SiLU | nn.Mish) for module in converted.modules())
