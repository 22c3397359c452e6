"""Hardening as functions of the model."""

import pytest
import torch
from closed_forms import SCHEDULE_FORMS, hardened, hardness, progress_at, target
from tiny_training import batch, hardness_values, lambda_gelus, raw_values, rows, state_of, tiny_model
from torch.nn.utils.parametrize import register_parametrization

from hf_lgelu import (
    anneal_hardness,
    freeze_hardness,
    hardness_parameter_groups,
    initialize_hardness,
    replace_activations,
)
from hf_lgelu.models.hardening import is_hardened, release_hardness

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


def test_hardnesses_of_channels_anneal_elementwise():
    model = tiny_model("gelu")
    inputs = batch(rows(4))["features"]
    replace_activations(model, granularity="channel", inputs=inputs, rewrite_config=False)
    owners = lambda_gelus(model)
    generator = torch.Generator().manual_seed(0)
    for module in owners:
        module.raw_hardness.data.uniform_(-0.3, 0.6, generator=generator)
    anneal_hardness(model, 0.5, schedule="geometric")
    for module in owners:
        raw, hard = module.raw_hardness.flatten().tolist(), module.hardness.flatten().tolist()
        start = [hardness(value, module.temperature.item()) for value in raw]
        assert hard == pytest.approx([float((value * target()) ** 0.5) for value in start], rel=FLOAT32)
        assert len(set(hard)) == len(hard) == 8
    anneal_hardness(model, 1.0)
    assert all((module.hardness == torch.tensor(TARGET)).all() for module in model.activations)


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
        with pytest.raises(RuntimeError, match="a parametrization computes the raw hardness of act"):
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
