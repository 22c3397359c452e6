"""The hardness group in optimizers that somebody else built, and in schedule-free ones."""

import pytest
import torch
from tiny_training import Fused, Layerwise, names_in, raw_values, tiny_model
from torch import nn

import hf_lgelu
from hf_lgelu import LambdaGELU, hardness_parameter_groups, separate_hardness_group
from hf_lgelu.training.optim import HARDNESS_GROUP, hardness_learning_rate, hold_averaged_hardness


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


def test_an_optimizer_that_has_a_scheduler_already_is_refused_and_left_alone():
    """The scheduler would set the new group's rate back to the others', or end at the next step."""
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    with pytest.raises(RuntimeError, match="a learning-rate scheduler belongs to the optimizer already"):
        separate_hardness_group(optimizer, model)
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


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


def test_a_second_separation_is_refused():
    """It would make the multiplier 81."""
    model = tiny_model()
    optimizer = separate(model)
    with pytest.raises(RuntimeError, match="has a hardness group already"):
        separate_hardness_group(optimizer, model)
    built = torch.optim.SGD(hardness_parameter_groups(model, 0.1))
    with pytest.raises(RuntimeError, match="has a hardness group already"):
        separate_hardness_group(built, model)
    assert hardness_learning_rate(optimizer) == hardness_learning_rate(built) == pytest.approx(0.9)


def test_a_model_without_lambda_gelu_is_refused():
    with pytest.raises(ValueError, match="TinyClassifier has no λ-GELU activation"):
        separate(tiny_model("relu"))


@pytest.mark.parametrize("kind", [Layerwise, Fused])
def test_optimizers_without_a_rate_per_group_are_refused(kind):
    model = tiny_model()
    with pytest.raises(RuntimeError, match=f"{kind.__name__} replaces the parameter groups or ignores"):
        separate_hardness_group(kind(model.parameters()), model)


def test_lbfgs_takes_no_group_beside_its_one():
    model = tiny_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(RuntimeError, match="LBFGS takes one group of parameters alone"):
        separate_hardness_group(optimizer, model)
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(list(model.parameters()))]


def test_muon_takes_no_hardness_of_two_axes_for_a_matrix():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), LambdaGELU(raw_shape=(4, 1)))
    optimizer = torch.optim.Muon(model.parameters())
    with pytest.raises(RuntimeError, match="Muon takes matrices alone"):
        separate_hardness_group(optimizer, model)
    assert len(optimizer.param_groups) == 1


def test_an_optimizer_that_lacks_one_hardness_is_refused():
    model = tiny_model()
    held = [parameter for parameter in model.parameters() if parameter is not model.activations[1].raw_hardness]
    with pytest.raises(RuntimeError, match="SGD replaces the parameter groups"):
        separate_hardness_group(torch.optim.SGD(held, lr=0.1), model)


def test_relative_step_sizes_are_refused():
    from transformers import Adafactor

    model = tiny_model()
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=False, lr=None)
    with pytest.raises(RuntimeError, match="Adafactor has no learning rate to multiply"):
        separate_hardness_group(optimizer, model)


@pytest.mark.parametrize("multiplier", [-1, float("nan"), "9"])
def test_bad_multipliers_are_refused(multiplier):
    with pytest.raises(ValueError, match="hardness_lr_multiplier must be a finite number >= 0"):
        separate(tiny_model(), multiplier)


def test_learning_rate_of_an_optimizer_without_hardness_group_is_none():
    assert hardness_learning_rate(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)) is None


class Flattened(nn.Module):
    """As FSDP without use_orig_params: one flat parameter, and the originals are views of it, not parameters."""

    def __init__(self, model):
        super().__init__()
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        for name, parameter in list(model.named_parameters()):
            owner = model.get_submodule(name.rpartition(".")[0])
            attribute = name.rpartition(".")[2]
            del owner._parameters[attribute]
            setattr(owner, attribute, parameter.detach())
        self.model, self.flat = model, nn.Parameter(flat)


def test_hardness_hidden_in_a_flat_parameter_is_refused():
    model = Flattened(tiny_model())
    assert [name for name, _ in model.named_parameters()] == ["flat"]
    with pytest.raises(RuntimeError, match=r"hidden in a flat parameter.*fsdp_version: 2"):
        hardness_parameter_groups(model, 0.1)
    with pytest.raises(RuntimeError, match="hidden in a flat parameter"):
        separate_hardness_group(torch.optim.SGD(model.parameters(), lr=0.1), model)


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


def test_public_names():
    assert hf_lgelu.hardness_parameter_groups is hardness_parameter_groups
    assert hf_lgelu.separate_hardness_group is separate_hardness_group
