"""Parameter groups, read back from the optimizers: learning rate, weight decay, membership."""

import pytest
import torch
from small_networks import NETWORKS
from tiny_training import lambda_gelus, names_in, tiny_model
from transformers import Trainer

from hf_lgelu import hardness_parameter_groups, hardness_profile, replace_activations
from hf_lgelu.models.optimizer_groups import HARDNESS_GROUP, separate_hardness_group


@pytest.mark.parametrize("network", ["mlp", "gpt2", "resnet"])
def test_groups_of_a_model(network):
    model = NETWORKS[network].model()
    replace_activations(model)
    groups = torch.optim.AdamW(hardness_parameter_groups(model, 1e-3, weight_decay=0.1)).param_groups
    every = {name for name, _ in model.named_parameters()}
    hardness = {name for name in every if name.endswith("raw_hardness")}
    assert len(hardness) == len(hardness_profile(model)) > 1
    decayed = set(Trainer.get_decay_parameter_names(None, model)) & every - hardness  # every: tied names once
    assert [names_in(model, group) for group in groups] == [
        sorted(decayed),
        sorted(every - decayed - hardness),
        sorted(hardness),
    ]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-3, 0.1), (1e-3, 0), (9 * 1e-3, 0)]


def test_frozen_parameters_are_left_out():
    model = tiny_model()
    model.classifier.requires_grad_(False)
    model.activations[0].raw_hardness.requires_grad_(False)
    decayed, undecayed, hardness = hardness_parameter_groups(model, 0.1)
    assert names_in(model, decayed) == ["linears.0.weight", "linears.1.weight"]
    assert names_in(model, undecayed) == ["linears.0.bias", "linears.1.bias", "norm.bias", "norm.weight"]
    assert names_in(model, hardness) == ["activations.1.raw_hardness"]
    assert decayed["weight_decay"] == 0


@pytest.mark.parametrize("all_frozen", [False, True])
def test_separation_leaves_a_frozen_hardness_alone(all_frozen):
    model = tiny_model()
    for module in lambda_gelus(model)[: None if all_frozen else 1]:
        module.raw_hardness.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    separate_hardness_group(optimizer, model)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    assert sizes == ([8] if all_frozen else [8, 1])


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
