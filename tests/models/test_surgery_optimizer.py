"""Surgery on a model in training: its optimizer, its hooks, a hardness that is computed from something else."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from hf_lgelu import LambdaGELU, hardness_parameter_groups, replace_activations, substitute_relu


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))


def train(model, optimizer, steps=2):
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def held(optimizer):
    return [{id(parameter) for parameter in group["params"]} for group in optimizer.param_groups]


def gates(model):
    return [module for module in model.modules() if isinstance(module, LambdaGELU)]


@pytest.mark.parametrize("named", [False, True])
def test_a_new_hardness_joins_the_optimizer_in_a_group_of_its_own(named):
    model = network()
    parameters = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3)
    train(model, optimizer)
    weights = [id(parameter) for parameter in model.parameters()]
    steps = [optimizer.state[parameter]["step"].item() for parameter in model.parameters()]
    replace_activations(model, optimizer=optimizer, hardness_lr_multiplier=4.0)
    assert held(optimizer) == [set(weights), {id(gate.raw_hardness) for gate in gates(model)}]
    group = optimizer.param_groups[1]
    assert (group["lr"], group["weight_decay"], group["group_name"]) == (0.04, 0.0, "hardness")
    assert [optimizer.state[p]["step"].item() for n, p in model.named_parameters() if "raw" not in n] == steps
    before = [gate.raw_hardness.item() for gate in gates(model)]
    train(model, optimizer)
    assert all(gate.raw_hardness.item() != s for gate, s in zip(gates(model), before, strict=True))
    assert len(optimizer.state_dict()["state"]) == len(weights) + 2


def test_a_substituted_hardness_leaves_the_optimizer_with_its_state():
    model = network()
    replace_activations(model)
    optimizer = torch.optim.AdamW(hardness_parameter_groups(model, 0.01))
    train(model, optimizer)
    old = [gate.raw_hardness for gate in gates(model)]
    assert all(s in optimizer.state for s in old)
    substitute_relu(model, optimizer=optimizer)
    assert set.union(*held(optimizer)) == {id(parameter) for parameter in model.parameters()}
    assert not any(s in optimizer.state for s in old)
    train(model, optimizer)  # and it goes on


def test_a_hardness_group_that_is_there_takes_the_new_ones_under_a_scheduler_too():
    model = network()
    replace_activations(model, include=lambda name: name == "1")
    optimizer = torch.optim.SGD(hardness_parameter_groups(model, 0.1))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    replace_activations(model, optimizer=optimizer)
    assert held(optimizer)[2] == {id(gate.raw_hardness) for gate in gates(model)}
    train(model, optimizer)
    scheduler.step()


def two_rates(model):
    return torch.optim.SGD([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(model.parameters())])


def scheduled(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    return optimizer


def wrapped(model):
    Accelerator(cpu=True)
    return AcceleratedOptimizer(torch.optim.LBFGS(model.parameters()))


REFUSED = {
    "another model's": (lambda model: torch.optim.SGD(network().parameters(), lr=0.1), ValueError, "none of the model"),
    "several rates": (two_rates, RuntimeError, "several learning rates"),
    "scheduled": (scheduled, RuntimeError, "a learning-rate scheduler"),
    "L-BFGS": (lambda model: torch.optim.LBFGS(model.parameters()), RuntimeError, "LBFGS takes one group of param"),
    "wrapped L-BFGS": (wrapped, RuntimeError, "LBFGS takes one group of parameters alone"),
    "Muon": (lambda model: torch.optim.Muon([model[0].weight]), RuntimeError, "Muon takes matrices alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_follow_is_refused_and_nothing_changes(name):
    make, error, message = REFUSED[name]
    model = network()
    optimizer = make(model)
    groups = len(getattr(optimizer, "param_groups", ()))
    with pytest.raises(error, match=message):
        replace_activations(model, optimizer=optimizer)
    assert gates(model) == []
    assert len(getattr(optimizer, "param_groups", ())) == groups


def test_hooks_stay_where_they_were():
    model, seen = network(), []
    handles = [
        model[1].register_forward_hook(lambda module, args, output: seen.append(type(module).__name__)),
        model[1].register_forward_pre_hook(lambda module, args, kwargs: seen.append("before"), with_kwargs=True),
        model[1].register_full_backward_hook(lambda module, *gradients: seen.append("backward")),
    ]
    x = torch.randn(2, 4)
    for change, name in ((lambda m: None, "GELU"), (replace_activations, "LambdaGELU"), (substitute_relu, "ReLU")):
        change(model)
        seen.clear()
        model(x).sum().backward()
        assert seen == ["before", name, "backward"]
    for handle in handles:
        handle.remove()
    seen.clear()
    model(x).sum().backward()
    assert seen == []
