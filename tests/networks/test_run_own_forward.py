"""Forwards that somebody put on an instance: accelerate's autocast goes for a while, closures are refused."""

import copy
import functools
import weakref

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

from hf_lgelu import (
    MLPConfig,
    MLPForClassification,
    absorb_hardness,
    anneal_hardness,
    convert_to_relu,
    export_gelu,
    export_onnx,
    export_relu,
    substitute_relu,
)
from hf_lgelu.models.copies import independent_copy
from hf_lgelu.networks.run import own_forward


def network(hardness=160.0):
    torch.manual_seed(0)
    model = MLPForClassification(MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2)).eval()
    anneal_hardness(model, 1.0, target_hardness=hardness)
    return model


def prepared(model):
    """As accelerate leaves a model that was trained with bf16 (Accelerator.prepare_model)."""
    model._original_forward = model.forward
    autocast = torch.autocast("cpu", torch.bfloat16)
    model.forward = convert_outputs_to_fp32(autocast(type(model).forward)).__get__(model)
    return model


INPUTS = {"features": torch.randn(64, 4, generator=torch.Generator().manual_seed(0))}


def test_the_autocast_of_accelerate_goes_and_comes_back():
    model = network()
    exact = model(**INPUTS).logits
    rounded = prepared(model)(**INPUTS).logits
    assert (rounded - exact).abs().max() > 1e-5
    with own_forward(model):
        assert torch.equal(model(**INPUTS).logits, exact)
        assert "forward" not in vars(model)
    assert torch.equal(model(**INPUTS).logits, rounded)
    assert torch.equal(independent_copy(model)(**INPUTS).logits, exact)
    with pytest.raises(KeyError), own_forward(model):
        raise KeyError
    assert torch.equal(model(**INPUTS).logits, rounded)


def test_a_model_trained_with_bfloat16_leaves_as_one_that_was_not(tmp_path):
    model = network()
    report = export_relu(prepared(network()), tmp_path / "relu", inputs=INPUTS)
    expected = export_relu(model, tmp_path / "exact", inputs=INPUTS)
    assert report.change == expected.change
    soft = network(1.7)
    assert export_gelu(prepared(network(1.7)), tmp_path / "gelu", inputs=INPUTS).relative_change < 1e-5
    absorb_hardness(plain := prepared(network(1.7)), INPUTS)
    with own_forward(plain):
        torch.testing.assert_close(plain(**INPUTS).logits, soft(**INPUTS).logits, rtol=1e-5, atol=1e-6)
    substitute_relu(relu := network())
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    assert export_onnx(prepared(relu), tmp_path / "model.onnx", INPUTS).max_abs_difference < 1e-5


def test_it_converts_as_a_model_that_was_not():
    config = MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2, hidden_act="gelu")
    torch.manual_seed(0)
    model = MLPForClassification(config).eval()
    wrapped = prepared(copy.deepcopy(model))
    expected = convert_to_relu(model, INPUTS).model(**INPUTS).logits
    converted = convert_to_relu(wrapped, INPUTS).model
    assert torch.equal(converted(**INPUTS).logits, expected)
    assert "_original_forward" not in vars(converted)
    assert "_original_forward" in vars(wrapped)


def closure(model):
    """What torch.compile(model.forward) leaves there: a function that knows the model from elsewhere."""
    forward = model.forward
    model.forward = lambda *arguments, **options: forward(*arguments, **options)
    return model


@pytest.mark.parametrize("inner", [False, True])
def test_a_copy_that_would_go_on_running_the_original_is_refused(inner):
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    closure(net[0] if inner else net)
    twin, inputs = copy.deepcopy(net), INPUTS["features"]
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    first = (twin[0] if inner else twin)(inputs)
    assert first.abs().max() > 0.1, "the zeroed copy computes with the original's weights"
    with pytest.raises(RuntimeError, match=r"Sequential cannot be copied: (0\.)?forward holds a function"):
        independent_copy(net)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        convert_to_relu(net, inputs)


class Stepping(nn.Module):
    """A network whose forward goes through a function that `wrap` makes of a method."""

    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.g, self.b = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)
        self.step = wrap(self)

    def method(self, x):
        return self.b(self.g(self.a(x)))

    def forward(self, x):
        return self.step(x)


def hooked(net):
    net.register_forward_hook(lambda module, inputs, output: output + net.b(net.g(net.a(inputs[0]))))
    return net.method


def referred(net):
    net.parent = weakref.ref(net)
    return net.method


@pytest.mark.parametrize(
    ("wrap", "where"),
    [
        (lambda net: torch.no_grad()(net.method), "step"),
        (lambda net: lambda x: net.method(x), "step"),
        (lambda net: lambda x, net=net: net.method(x), "step"),
        (lambda net: {"each": [functools.partial(lambda f, x: f(x), lambda x: net.b(net.g(net.a(x))))]}, "step"),
        (hooked, "_forward_hooks"),
        (referred, "parent"),
    ],
    ids=["decorated", "closure", "default", "nested", "hook", "weak"],
)
def test_a_function_that_knows_the_original_is_refused(wrap, where):
    net = Stepping(wrap)
    with pytest.raises(RuntimeError, match=rf"Stepping cannot be copied: {where} holds a function"):
        independent_copy(net)


def test_functions_that_know_nothing_of_the_original_are_copied_with_it():
    seen = []
    net = Stepping(lambda net: functools.partial(Stepping.method, net))
    net.a.register_forward_hook(lambda module, inputs, output: seen.append(type(module).__name__))
    net.own = net.method
    twin = independent_copy(net)
    with torch.no_grad():
        twin.b.weight.zero_()
        twin.b.bias.zero_()
    assert twin(INPUTS["features"]).abs().max() == 0 < net(INPUTS["features"]).abs().max()
    assert seen == ["Linear", "Linear"]
