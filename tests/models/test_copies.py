"""Copies that share nothing with the original, and functions that would."""

import copy
import functools
import weakref

import pytest
import torch
from torch import nn

from hf_lgelu import convert_to_relu
from hf_lgelu.models.copies import independent_copy


def closure(model):
    """What torch.compile(model.forward) leaves there: a function that knows the model from elsewhere."""
    forward = model.forward
    model.forward = lambda *arguments, **options: forward(*arguments, **options)
    return model


@pytest.mark.parametrize("inner", [False, True])
def test_a_copy_that_would_go_on_running_the_original_is_refused(inner):
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    closure(net[0] if inner else net)
    twin, inputs = copy.deepcopy(net), torch.randn(64, 4)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    first = (twin[0] if inner else twin)(inputs)
    assert first.abs().max() > 0.1, "the zeroed copy computes with the original's weights"
    with pytest.raises(RuntimeError, match=r"Sequential.*(0\.)?forward"):
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
    with pytest.raises(RuntimeError, match=rf"Stepping.*{where}"):
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
    inputs = torch.randn(64, 4)
    assert twin(inputs).abs().max() == 0 < net(inputs).abs().max()
    assert seen == ["Linear", "Linear"]
