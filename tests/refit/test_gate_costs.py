"""What the swap of each gate alone costs; a number keeps the gates that cost the most."""

import copy

import pytest
import torch
from small_networks import convert_with
from torch import nn

from hf_lgelu import MLPConfig, MLPForClassification
from hf_lgelu.networks.batches import read_batches
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.gate_costs import gate_costs
from hf_lgelu.refit.samples import read_samples


def test_a_number_keeps_the_gates_that_cost_the_most():
    config = MLPConfig(num_features=5, hidden_size=9, num_hidden_layers=3, num_labels=3, hidden_act="gelu")
    model, inputs = MLPForClassification(config).eval(), torch.randn(400, 5)
    with torch.no_grad():
        for layer, factor in zip(model.layers, (1, 9, 3), strict=True):
            layer.linear.weight.mul_(factor)
    folds = deal_folds(read_samples(read_batches(inputs))).folds
    fitted = torch.cat([batch.load().inputs for fold in folds for batch in fold])
    costs = {}
    for index in range(3):
        swapped = copy.deepcopy(model)
        swapped.layers[index].activation = nn.ReLU()
        with torch.no_grad():
            wanted, given = (network(fitted).logits.log_softmax(-1) for network in (model, swapped))
        costs[f"layers.{index}.activation"] = (wanted.exp() * (wanted - given)).sum().item()
    order = sorted(costs, key=costs.get, reverse=True)
    for count in (1, 2):
        _, report = convert_with(model, inputs, keep=count, max_kl=None)
        assert set(report.kept) == set(order[:count])
        assert set(report.gates) == set(order[count:])
        (kept,) = (line for line in str(report).splitlines() if "gates that stayed smooth: " in line)
        assert all(f"`{name}` (GELUActivation)" in kept for name in order[:count])
    found = gate_costs(model, fitted, max_samples=None)
    assert list(found) == order
    assert found == pytest.approx({name: cost / len(fitted) for name, cost in costs.items()}, rel=1e-4)
    with pytest.raises(ValueError, match="look for NaN"):
        gate_costs(model, torch.full_like(inputs, float("nan")))
