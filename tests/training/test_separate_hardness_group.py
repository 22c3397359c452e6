"""The hardness group in optimizers that somebody else built, and in schedule-free ones."""

import pytest
import torch
from tiny_training import names_in, raw_values, tiny_model

from hf_lgelu.models.optimizer_groups import (
    HARDNESS_GROUP,
    hardness_learning_rate,
    hold_averaged_hardness,
    separate_hardness_group,
)


def separate(model, multiplier=9.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    separate_hardness_group(optimizer, model, multiplier)
    return optimizer


# Optimizers that somebody else built


def test_separated_group_has_the_multiple_of_its_groups_rate_and_no_decay():
    model = tiny_model()
    optimizer = torch.optim.AdamW(
        [
            {"params": [*model.linears.parameters(), *model.activations[0].parameters()], "lr": 0.1, "eps": 1e-5},
            {"params": [*model.classifier.parameters(), *model.norm.parameters(), *model.activations[1].parameters()]},
        ],
        lr=0.01,
        weight_decay=0.3,
        betas=(0.8, 0.9),
    )
    separate_hardness_group(optimizer, model, 5.0)
    read = [
        (len(group["params"]), group["lr"], group["weight_decay"], group["eps"], group["betas"])
        for group in optimizer.param_groups
    ]
    assert read == [
        (4, 0.1, 0.3, 1e-5, (0.8, 0.9)),
        (4, 0.01, 0.3, 1e-8, (0.8, 0.9)),
        (1, 0.5, 0, 1e-5, (0.8, 0.9)),
        (1, pytest.approx(0.05), 0, 1e-8, (0.8, 0.9)),
    ]
    assert [group.get("group_name") for group in optimizer.param_groups] == [None, None, HARDNESS_GROUP, HARDNESS_GROUP]
    assert names_in(model, optimizer.param_groups[2]) == ["activations.0.raw_hardness"]
    assert hardness_learning_rate(optimizer) == 0.5


def test_separation_takes_optimizers_of_named_parameters():
    model = tiny_model()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    separate_hardness_group(optimizer, model)
    assert [len(group["params"]) for group in optimizer.param_groups] == [8, 2]
    for group in optimizer.param_groups:
        assert group["param_names"] == [
            name for name, p in model.named_parameters() if any(p is q for q in group["params"])
        ]
    assert optimizer.param_groups[1]["param_names"] == ["activations.0.raw_hardness", "activations.1.raw_hardness"]


def test_separation_multiplies_a_tensor_rate():
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25))
    separate_hardness_group(optimizer, model, 8.0)
    assert hardness_learning_rate(optimizer) == 2.0
    assert optimizer.param_groups[0]["lr"].item() == 0.25  # a copy: the weights' rate is not multiplied with it


def test_separated_s_takes_one_sgd_step_of_c_times_the_rate():
    model = tiny_model()
    optimizer = separate(model)
    before = raw_values(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    bias = model.classifier.bias.detach().clone()
    optimizer.step()
    torch.testing.assert_close(bias - model.classifier.bias, torch.full((3,), 0.1))
    assert [a - b for a, b in zip(before, raw_values(model), strict=True)] == pytest.approx([0.9, 0.9], rel=1e-6)


# Schedule-free optimizers


def test_averaged_sequence_is_set_to_s_and_nothing_else_is_touched():
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"z": torch.full_like(parameter, 7.0)}
    hold_averaged_hardness(optimizer, model)
    for name, parameter in model.named_parameters():
        expected = parameter if name.endswith("raw_hardness") else torch.full_like(parameter, 7.0)
        assert torch.equal(optimizer.state[parameter]["z"], expected)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    hold_averaged_hardness(other, model)
    assert not other.state
