"""Reading and setting the hardness of a whole model."""

import copy
import math

import pytest
import torch
from closed_forms import SCHEDULE_FORMS, hardened, hardness, progress_at, target
from tiny_training import (
    CLASSES,
    FEATURES,
    batch,
    hardness_values,
    lambda_gelus,
    raw_values,
    rows,
    state_of,
    tiny_model,
)
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from hf_lgelu import (
    LambdaGELU,
    anneal_hardness,
    freeze_hardness,
    hardness_parameter_groups,
    hardness_profile,
    initialize_hardness,
    substitute_relu,
)
from hf_lgelu.models.hardening import hardening_progress, is_hardened, release_hardness


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
    ({"init_mode": "increasing", "init_hardness": 3.0, "high_hardness": 2.0}, "init_hardness"),
    ({"temperature": -1.0}, "temperature"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=lambda value: str(value))
def test_bad_arguments_change_nothing(arguments, message):
    model = chain(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        initialize_hardness(model, **arguments)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("function", [hardness_profile, initialize_hardness])
def test_a_model_without_hardness_is_refused(function):
    with pytest.raises(ValueError, match="it has GELU × 1, SiLU × 1"):
        function(nn.Sequential(nn.GELU(), nn.SiLU()))


TARGET = float(target())
FLOAT32 = 2**-23  # one unit in the last place of a float32, relative


@pytest.fixture
def model():
    """Two sites with hardness and temperature of their own."""
    model = tiny_model()
    initialize_hardness(model, "increasing", init_hardness=1.02, high_hardness=7.0)
    initialize_hardness(model.activations[1], init_hardness=7.0, temperature=0.3)
    return model


def starts(model):
    """λ(s) of each layer by hand."""
    return [hardness(module.raw_hardness.item(), module.temperature.item()) for module in lambda_gelus(model)]


@pytest.mark.parametrize("schedule", SCHEDULE_FORMS)
@pytest.mark.parametrize("end", [None, 40.0, 1.5])
def test_annealed_hardness_is_the_formula_of_each_layer(model, schedule, end):
    before = raw_values(model)
    options = {} if end is None else {"target_hardness": end}
    for position in range(3, 11):
        progress = progress_at(position, 10, 2)
        anneal_hardness(model, float(progress), schedule=schedule, **options)
        by_hand = [hardened(schedule, start, end or TARGET, progress) for start in starts(model)]
        assert hardness_values(model) == pytest.approx(by_hand, rel=FLOAT32)
        assert raw_values(model) == before
    assert hardness_values(model) == [torch.tensor(end or TARGET).item()] * 2


def test_s_gets_a_gradient_of_exactly_zero_while_annealed_and_rules_again_when_released(model):
    def gradients():
        model.zero_grad()
        model(**batch(rows(8))).loss.backward()
        return [module.raw_hardness.grad.item() for module in lambda_gelus(model)]

    learned = hardness_values(model)
    assert all(gradients())
    anneal_hardness(model, 0.5)
    assert gradients() == [0.0, 0.0]  # not None: DDP's reducer waits for them
    release_hardness(model)
    assert all(gradients())
    assert hardness_values(model) == learned


@pytest.mark.parametrize("freezes", [True, False])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "parametrized"])
def test_momentum_moves_s_unless_it_is_frozen(freezes, kind):
    """Why freeze_hardness exists: a gradient of exactly 0 is not enough."""
    model, data = tiny_model(), batch(rows(8))
    groups = hardness_parameter_groups(model, 0.05)
    optimizer = torch.optim.AdamW(groups) if kind == "adamw" else torch.optim.SGD(groups, momentum=0.9)
    if kind == "parametrized":  # the optimizer moves the parameter from which s is computed
        for module in lambda_gelus(model):
            register_parametrization(module, "raw_hardness", torch.nn.Softsign())
        with pytest.raises(RuntimeError, match=r"activations\.0 is no parameter.*parametrization"):
            anneal_hardness(model, 0.5)

    def step(freezes):
        optimizer.zero_grad()
        model(**data).loss.backward()
        if freezes:
            freeze_hardness(model)
        optimizer.step()

    for _ in range(5):
        step(False)
    if kind != "parametrized":
        anneal_hardness(model, 0.5)
    before, weights = raw_values(model), state_of(model)
    for _ in range(5):
        step(freezes)
    assert (raw_values(model) == before) == freezes
    assert not torch.equal(weights["linears.0.weight"], model.linears[0].weight)  # weights train on
    assert all(s.requires_grad for module in lambda_gelus(model) for s in module.parameters())


def test_is_hardened_from_half_the_target_at_every_layer(model):
    assert not is_hardened(model)
    half = TARGET / 2
    for hard, expected in (((half * 0.999, 160.0), False), ((160.0, half * 0.999), False), ((half * 1.001,) * 2, True)):
        for module, value in zip(lambda_gelus(model), hard, strict=True):
            module.hardness_override.fill_(value)
        assert is_hardened(model) is expected
    assert not is_hardened(model, 400.0)
    assert is_hardened(model, 20.0)


def test_a_model_spread_over_devices_is_annealed_on_each():
    model = tiny_model()
    far = model.activations[1].to("meta")  # which no operation may mix with another device
    anneal_hardness(model, 1.0, target_hardness=30.0)
    assert model.activations[0].hardness.item() == pytest.approx(30.0)
    assert far.hardness_override.is_meta


def test_a_plain_pytorch_loop_hardens():
    """Algorithm 1's λ in each of eight epochs, and a swap at the end that changes little."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 16), LambdaGELU(), nn.Linear(16, 16), LambdaGELU(), nn.Linear(16, CLASSES)]
    network, data = nn.Sequential(*layers), [batch(rows(16, seed)) for seed in range(6)]
    optimizer = torch.optim.AdamW(hardness_parameter_groups(network, 0.01, weight_decay=0.01))
    path = [hardness_values(network)]
    for epoch in range(1, 9):
        progress = hardening_progress(epoch, 8)
        if progress is not None:
            anneal_hardness(network, progress)
        for inputs in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs["features"]), inputs["labels"]).backward()
            if progress is not None:
                freeze_hardness(network)
            optimizer.step()
        path.append(hardness_values(network))
    learned = [float(value) for value in starts(network)]
    assert path[2] == pytest.approx(learned, rel=1e-5)
    assert all(abs(value - first) > 0.01 for value, first in zip(learned, path[0], strict=True))
    for epoch in range(3, 9):
        by_hand = [value + (epoch - 2) / 6 * (TARGET - value) for value in learned]
        assert path[epoch] == pytest.approx(by_hand, rel=1e-6)
    x, relu, soft = torch.randn(64, FEATURES), copy.deepcopy(network), copy.deepcopy(network)
    assert len(substitute_relu(relu)) == 2
    release_hardness(soft)
    assert 0 < (network(x) - relu(x)).abs().max() < (soft(x) - relu(x)).abs().max() / 20
