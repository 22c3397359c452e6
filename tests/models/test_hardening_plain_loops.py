"""Hardening with three calls in a loop of one's own, with the swap at their end."""

import copy

import pytest
import torch
from closed_forms import hardness, target
from tiny_training import CLASSES, FEATURES, batch, hardness_values, raw_values, rows
from torch import nn

from hf_lgelu import anneal_hardness, freeze_hardness, hardness_parameter_groups, replace_activations, substitute_relu
from hf_lgelu.models.hardening import hardening_progress, release_hardness
from hf_lgelu.networks.smooth_calls import find_smooth_calls

TARGET = float(target())

EPOCHS, SWITCH = 8, 2
KAPPA = 0.169968  # max_u u(1 − Φ(u)), rounded up


def plain_network():
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, CLASSES)]
    network = nn.Sequential(*layers)
    replace_activations(network)
    return network


def swap_bound(network):
    """By hand: a swap moves an activation by at most κ/λ, and ReLU passes on at most what it is given."""
    moved = 0.0
    for layer in network:
        moved = (
            layer.weight.abs().sum(dim=1).max().item() * moved
            if isinstance(layer, nn.Linear)
            else moved + KAPPA / TARGET
        )
    return moved


def check_end(network, path, before):
    """Algorithm 1's λ in every epoch, and a swap that changes as little as λ = 159.577 promises."""
    at_switch = [float(hardness(raw, 0.1)) for raw in raw_values(network)]
    assert all(abs(new - old) > 0.01 for new, old in zip(at_switch, before, strict=True))  # λ was learned
    assert path[SWITCH - 1] == pytest.approx(at_switch, rel=1e-5)
    for epoch in range(SWITCH + 1, EPOCHS + 1):
        share = (epoch - SWITCH) / (EPOCHS - SWITCH)
        by_hand = [start + share * (TARGET - start) for start in at_switch]
        assert path[epoch - 1] == pytest.approx(by_hand, rel=1e-6)
    assert hardness_values(network) == [torch.tensor(TARGET).item()] * 2

    inputs = batch(rows(64, seed=9))["features"]
    relu, soft = copy.deepcopy(network), copy.deepcopy(network)
    assert len(substitute_relu(relu)) == 2
    assert not find_smooth_calls(relu, inputs)
    release_hardness(soft)
    with torch.no_grad():
        change = (network(inputs) - relu(inputs)).abs().max().item()
        direct = (soft(inputs) - relu(inputs)).abs().max().item()
    assert 0 < change <= swap_bound(network) < direct / 5


def test_a_plain_pytorch_loop_hardens():
    network, data = plain_network(), [batch(rows(16, seed)) for seed in range(6)]
    optimizer = torch.optim.AdamW(hardness_parameter_groups(network, 0.01, weight_decay=0.01))
    before, path = hardness_values(network), []
    for epoch in range(1, EPOCHS + 1):
        progress = hardening_progress(epoch, EPOCHS)
        if progress is not None:
            anneal_hardness(network, progress)
        for inputs in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs["features"]), inputs["labels"]).backward()
            if progress is not None:
                freeze_hardness(network)
            optimizer.step()
        path.append(hardness_values(network))
    check_end(network, path, before)
