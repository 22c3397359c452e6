"""What an activation computes is read from its values, whatever it is written as."""

import copy

import pytest
import torch
from small_networks import MemorySwish
from torch import nn
from torch.nn import functional as F

from hf_lgelu.networks.elementwise import (
    BOUNDED_KINDS,
    CONVERTED_KINDS,
    elementwise_values,
    form_of_activation,
    form_of_values,
    values_of_activation,
)
from hf_lgelu.networks.smooth_calls import find_smooth_calls


class OwnSwish(nn.GELU):
    """Another function than its base, which keeps count and keeps its output."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.last = 0, [], torch.zeros(1)

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.shape)
        self.last = x * torch.sigmoid(x)
        return self.last


class Scaled(nn.Module):
    """A weight for each channel of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1, 6, 1, 1))

    def forward(self, x):
        return torch.where(x > 0, x, self.slope * x)


class TwoArguments(nn.Module):
    def forward(self, x, y):
        return F.silu(x) * y


class Broken(nn.Module):
    def forward(self, x):
        return F.silu(x) / 0 if not x.numel() else {}["x"]


class Wide(nn.Module):
    """Elementwise, but with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return F.silu(x)


MODULES = {
    "gelu": (nn.GELU(), nn.GELU("tanh")),
    "silu": (nn.SiLU(inplace=True), OwnSwish()),
    "mish": (nn.Mish(),),
    "hardswish": (nn.Hardswish(),),
    "leaky_relu": (nn.LeakyReLU(0.3, inplace=True), nn.RReLU()),
    "prelu": (nn.PReLU(), nn.PReLU(7), nn.PReLU(600), nn.PReLU(3, dtype=torch.bfloat16, device="meta"), Scaled()),
    "elu": (nn.ELU(), nn.ELU(0.5), nn.CELU()),
    "selu": (nn.SELU(),),
    "celu": (nn.CELU(2.0),),
    "softplus": (nn.Softplus(), nn.Softplus(3.0)),
    "tanh": (nn.Tanh(),),
    "sigmoid": (nn.Sigmoid(),),
    "softsign": (nn.Softsign(),),
    "relu": (nn.ReLU(), nn.Threshold(0.0, 0.0), nn.LeakyReLU(0.0)),
    "relu6": (nn.ReLU6(), nn.Hardtanh(0.0, 6.0)),
    None: (
        *(nn.Identity(), nn.Dropout(), nn.BatchNorm1d(8), nn.BatchNorm2d(4), nn.LayerNorm(8), nn.RMSNorm(8)),
        *(nn.Softmax(-1), nn.Softmax(0), nn.GLU(), nn.MaxPool1d(1), nn.AvgPool2d(2), nn.Linear(8, 8), nn.LazyLinear(8)),
        *(nn.Hardshrink(), nn.Softshrink(), nn.Tanhshrink(), nn.Hardtanh(), nn.Hardsigmoid(), nn.LogSigmoid()),
        *(nn.Threshold(1.0, 0.5), nn.LeakyReLU(1.0), nn.Sequential(nn.GELU()), TwoArguments(), Broken(), Wide()),
    ),
}
FUNCTIONS = {
    "gelu": (
        lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))),
        lambda x: x * torch.sigmoid(1.702 * x),
    ),
    "silu": (F.silu, MemorySwish(), lambda x: x / (1 + torch.exp(-x)), lambda x: x.mul_(x.sigmoid())),
    "mish": (lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),),
    "hardswish": (lambda x: x * F.relu6(x + 3) / 6,),
    "softplus": (lambda x: torch.log(1 + torch.exp(x)),),  # overflows far out
    "elu": (lambda x: torch.where(x > 0, x, x.exp() - 1),),
    "other": (
        lambda x: x * torch.sigmoid(0.7 * x),
        lambda x: F.softplus(x) - 0.6931,
        lambda x: 1.7 * F.gelu(x),
        lambda x: 0.5 * x * (x + 2).clamp(0, 2),
    ),
    "relu": (torch.relu_, lambda x: x.clamp(min=0), lambda x: (x + x.abs()) / 2),
    None: (
        *(torch.abs, torch.exp, torch.sqrt, torch.square, torch.sin, torch.isnan, F.normalize, lambda x: 3 * x + 1),
        *(lambda x: x.relu() ** 2, lambda x: x + x.sin() ** 2, lambda x: F.gelu(x).clamp(-10, 10), F.dropout),
        *(lambda x: x.clamp(min=0.1), lambda x: x / x.abs().max(), lambda x: F.silu(x - x.mean()), lambda x: None),
        *(lambda x: F.rrelu(x, training=True), lambda x: x.t(), lambda x: x[:1]),
    ),
}


def test_a_norm_over_single_elements_is_no_activation():
    norm = nn.GroupNorm(8, 8)  # of (N, 8) each group is one element
    assert values_of_activation(norm) is None
    assert find_smooth_calls(nn.Sequential(norm), torch.randn(1, 8, 5)) == []


@pytest.mark.parametrize(("kind", "module"), [(kind, module) for kind, held in MODULES.items() for module in held])
def test_the_kind_of_a_module(kind, module):
    form = form_of_activation(module.train())
    assert (form and form.kind) == kind


@pytest.mark.parametrize(("kind", "function"), [(kind, given) for kind, held in FUNCTIONS.items() for given in held])
def test_the_kind_of_a_function(kind, function):
    form = form_of_values(elementwise_values(function))
    assert (form and form.kind) == kind


def test_every_kind_is_tried_here():
    assert {*CONVERTED_KINDS, *BOUNDED_KINDS} <= MODULES.keys() | FUNCTIONS.keys()


def test_nothing_is_changed_by_the_trial():
    module, hooked = OwnSwish(), []
    module.register_forward_hook(lambda *given: hooked.append(given))
    prelu = nn.PReLU(3)
    before, drawn = copy.deepcopy(vars(module)), torch.get_rng_state()
    assert form_of_activation(module).kind == "silu"
    assert form_of_activation(prelu).kind == "prelu"
    assert elementwise_values(F.dropout) is None  # draws random numbers
    assert (module.calls, module.seen, hooked, module.training) == (0, [], [], True)
    assert torch.equal(module.last, before["last"])
    assert torch.equal(prelu.weight, torch.full((3,), 0.25))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_what_was_read_follows_the_attributes():
    module = nn.GELU()
    assert form_of_activation(module).name == "gelu"
    module.approximate = "tanh"
    assert form_of_activation(module).name == "gelu_pytorch_tanh"
    with torch.device("meta"):
        assert form_of_activation(nn.CELU(3.0)).kind == "celu"


def test_a_trial_is_not_seen_by_what_records_a_run():
    class Own(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(1.234 * x)

    (call,) = find_smooth_calls(nn.Sequential(nn.Identity(), Own()), torch.zeros(1, 3))
    assert (call.module, call.operation, call.count) == ("1", "sigmoid", 1)


class Irrep(tuple):
    def __len__(self):
        raise NotImplementedError


def test_an_attribute_of_any_class_is_only_looked_at():
    module = OwnSwish()
    module.irreps = [Irrep((0, 1))]
    assert form_of_activation(module).kind == "silu"
