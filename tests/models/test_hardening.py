"""Reading and setting the hardness of a whole model."""

import math

import pytest
import torch
from torch import nn

from hf_lgelu import LambdaGELU, LambdaSiLU, hardness_profile, initialize_hardness
from hf_lgelu.models.hardening import mean_of_several, smallest_by_site


class Backwards(nn.Module):
    """Three activations, registered in the order 0, 1, 2 and run in the order 2, 0, 1."""

    def __init__(self):
        super().__init__()
        self.acts = nn.ModuleList(LambdaGELU() for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.norm.eval()

    def forward(self, x):
        return self.acts[1](self.acts[0](self.acts[2](self.norm(x))))


def chain(count, **options):
    return nn.Sequential(*(LambdaGELU(**options) for _ in range(count)))


CLOSED_FORMS = [
    ("uniform", 4, [1.1, 1.1, 1.1, 1.1]),
    ("increasing", 4, [1.1, 1.4, 1.7, 2.0]),
    ("decreasing", 4, [2.0, 1.7, 1.4, 1.1]),
    ("increasing", 1, [1.1]),
    ("decreasing", 1, [2.0]),
]


@pytest.mark.parametrize(("mode", "count", "expected"), CLOSED_FORMS)
def test_init_modes_are_linear_in_hardness(mode, count, expected):
    model = chain(count)
    returned = initialize_hardness(model, mode, 1.1, 2.0)
    assert list(returned.items()) == [(str(i), pytest.approx(value)) for i, value in enumerate(expected)]
    # λ(s) = 1 + softplus(s/t), in float64, from what the modules hold
    actual = [1 + math.log1p(math.exp(module.raw_hardness.item() / 0.1)) for module in model]
    assert actual == pytest.approx(expected, rel=1e-6)
    assert list(hardness_profile(model).values()) == pytest.approx(expected, rel=1e-6)


def test_example_inputs_give_the_order_of_execution():
    model = Backwards().train()
    model.norm.eval()
    registered = initialize_hardness(model, "increasing", 1.1, 1.3)
    assert list(registered) == ["acts.0", "acts.1", "acts.2"]
    executed = initialize_hardness(model, "increasing", 1.1, 1.3, inputs=torch.randn(2, 4))
    assert list(executed) == ["acts.2", "acts.0", "acts.1"]
    assert list(hardness_profile(model).values()) == pytest.approx([1.2, 1.3, 1.1])
    assert model.training
    assert not model.norm.training
    assert not any(module._forward_hooks for module in model.modules())


def test_a_site_with_several_hardnesses_shows_their_mean():
    model = nn.Sequential(nn.Linear(2, 3), LambdaGELU(raw_shape=(3,)))
    raw = [-0.1, 0.0, 0.4]
    with torch.no_grad():
        model[1].raw_hardness.copy_(torch.tensor(raw))
    expected = [1 + math.log1p(math.exp(s / 0.1)) for s in raw]
    assert hardness_profile(model) == {"1": pytest.approx(sum(expected) / 3, rel=1e-6)}
    assert smallest_by_site(model) == {"1": pytest.approx(expected[0], rel=1e-6)}
    model.append(LambdaSiLU(init_hardness=2.0))
    assert mean_of_several(model) == {"1": pytest.approx(sum(expected) / 3, rel=1e-6)}
    initialize_hardness(model, "uniform", 1.25)
    assert model[1].hardness.tolist() == pytest.approx([1.25] * 3)


def test_initializing_lifts_the_override_and_keeps_or_sets_the_temperature():
    model = chain(2, temperature=0.3)
    for module in model:
        module.hardness_override.fill_(50.0)
    assert list(hardness_profile(model).values()) == [50.0, 50.0]
    initialize_hardness(model, "uniform", 1.5)
    assert list(hardness_profile(model).values()) == pytest.approx([1.5, 1.5])
    assert [module.raw_hardness.item() for module in model] == pytest.approx([0.3 * math.log(math.expm1(0.5))] * 2)
    initialize_hardness(model, "uniform", 1.5, temperature=0.2)
    assert list(hardness_profile(model).values()) == pytest.approx([1.5, 1.5])
    assert [module.temperature.item() for module in model] == pytest.approx([0.2, 0.2])
    assert [module.raw_hardness.item() for module in model] == pytest.approx([0.2 * math.log(math.expm1(0.5))] * 2)


ERRORS = [
    ({"init_mode": "rising"}, "rising"),
    ({"init_hardness": 1.0}, "1.0"),
    ({"init_mode": "increasing", "init_hardness": 3.0, "high_hardness": 2.0}, "init_hardness must not exceed"),
    ({"temperature": -1.0}, "temperature"),
    ({"high_hardness": 9.0}, "high_hardness=9.0 is the high end of 'increasing' and 'decreasing'"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=lambda value: str(value))
def test_bad_arguments_change_nothing(arguments, message):
    model = chain(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        initialize_hardness(model, **arguments)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_site_that_the_inputs_never_reach_is_named():
    model = Backwards()
    model.unused = LambdaGELU()
    before = hardness_profile(model)
    with pytest.raises(ValueError, match="never reach unused"):
        initialize_hardness(model, "increasing", inputs=torch.randn(2, 4))
    assert hardness_profile(model) == before


@pytest.mark.parametrize("function", [hardness_profile, initialize_hardness])
def test_a_model_without_hardness_is_refused(function):
    with pytest.raises(ValueError, match="it has GELU × 1, SiLU × 1"):
        function(nn.Sequential(nn.GELU(), nn.SiLU()))
