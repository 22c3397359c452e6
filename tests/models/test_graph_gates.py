"""Formulas of gates in graphs of torch.fx."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

from hf_lgelu import convert_to_relu
from hf_lgelu.models.graph_gates import with_gate_modules

C = math.sqrt(2 / math.pi)
FORMULAS = {
    "silu": (lambda x: x * torch.sigmoid(x), nn.SiLU()),
    "silu, by exp": (lambda x: x / (1 + (-x).exp()), nn.SiLU()),
    "silu, from the right": (lambda x: x.sigmoid().mul(x), nn.SiLU()),
    "hardswish": (lambda x: x * F.relu6(x + 3) / 6, nn.Hardswish()),
    "hardswish, clamped": (lambda x: x * (torch.clamp(x + 3, 0, 6) * (1 / 6)), nn.Hardswish()),
    "hardswish, hardsigmoid": (lambda x: x * F.hardsigmoid(x), nn.Hardswish()),
    "gelu": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), nn.GELU()),
    "gelu, half at the end": (lambda x: 0.5 * (x * (1.0 + torch.erf(x * math.sqrt(0.5)))), nn.GELU()),
    "gelu, tanh": (lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x**3))), nn.GELU("tanh")),
    "gelu, tanh in products": (lambda x: x * (torch.tanh(C * (x + 0.044715 * x * x * x)) + 1) / 2, nn.GELU("tanh")),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), None),
    "mish": (lambda x: x * torch.tanh(F.softplus(x)), nn.Mish()),
    "mish, by log": (lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))), nn.Mish()),
}


class Formula(nn.Module):
    def __init__(self, formula):
        super().__init__()
        self.a, self.b, self.c, self.formula = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4), formula

    def forward(self, x):
        return self.c(self.formula(self.b(self.formula(self.a(x)))))


def gates(module):
    return [name for name, part in module.named_modules() if not [*part.children()] and not [*part.parameters()]]


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_becomes_one_module_and_converts(name):
    torch.manual_seed(0)
    formula, plain = FORMULAS[name]
    network = symbolic_trace(Formula(formula))
    x, code = torch.randn(300, 8), network.code
    made = with_gate_modules(network)
    assert len(gates(made)) == 2
    assert len([node for node in made.graph.nodes if node.op in ("call_function", "call_method")]) == 0
    torch.testing.assert_close(made(x), network(x), rtol=1e-5, atol=1e-6)
    if plain is not None:
        torch.testing.assert_close(made.get_submodule(gates(made)[0])(x), plain(x), rtol=1e-5, atol=1e-6)
    converted, report = convert_to_relu(network, x)
    assert network.code == code
    assert report.held_out.refitted.kl < 0.3 * report.held_out.direct.kl
    assert report.smooth_calls == ()
    for again in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted)), symbolic_trace(converted)):
        assert torch.equal(again(x), converted(x))


NO_FORMULAS = {
    "a gate of another tensor": lambda x: x * torch.sigmoid(x.flip(-1)),
    "a value for each channel": lambda x: x * torch.sigmoid(x.mean(-1, keepdim=True)),
    "twice a gelu": lambda x: x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "a normalization": lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
    "a residual sum": lambda x: x + torch.sigmoid(x),
    "attention": lambda x: x * torch.softmax(x, -1),
}


@pytest.mark.parametrize("formula", NO_FORMULAS.values(), ids=NO_FORMULAS)
def test_other_formulas_stay(formula):
    network = symbolic_trace(Formula(formula))
    assert with_gate_modules(network) is network


def test_a_formula_ends_before_its_values_are_moved():
    class Flat(nn.Module):
        def forward(self, x):
            return (x * F.relu6(x + 3) / 6).flatten(1), torch.sigmoid(x).flatten(1) * x.flatten(1)

    network, x = symbolic_trace(Flat()), torch.randn(4, 3, 2, 2)
    made = with_gate_modules(network)
    assert gates(made) == ["truediv_gate"]
    for found, expected in zip(made(x), network(x), strict=True):
        torch.testing.assert_close(found, expected)


def test_what_else_is_read_of_a_formula_stays():
    class Both(nn.Module):
        def forward(self, x):
            gate = torch.sigmoid(x)
            return x * gate, gate

    network = symbolic_trace(Both())
    made = with_gate_modules(network)
    x = torch.randn(5)
    assert len(gates(made)) == 1
    torch.testing.assert_close(made(x), network(x))
    holder = nn.Sequential(network)
    assert gates(with_gate_modules(holder)) == ["0.mul_gate"]
    assert gates(holder) == ["0"]
