"""Rows of the linear-pieces measurement on tiny networks."""

from types import SimpleNamespace

import pytest
import torch
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements.linear_pieces import (
    LINEAR_PIECES,
    LINEAR_PIECES_COLUMNS,
    activation_pattern,
    first_order_models,
)

from hf_lgelu.models.mlp import MLPConfig, MLPForClassification


def measured(measurement, *activations):
    torch.manual_seed(0)
    data = SimpleNamespace(test=SimpleNamespace(features=torch.randn(12, 3)))
    models = {}
    for name in activations:
        network = MLPForClassification(MLPConfig(num_features=3, hidden_size=4, hidden_act=name, num_labels=2)).eval()
        models[name] = SimpleNamespace(load=lambda network=network: network)
    return measurement.measure(models, BENCHMARKS["mlp-digits"], data, measurement.settings())


def test_linear_pieces_rows():
    rows = measured(LINEAR_PIECES, "relu", "gelu")
    assert all(row.keys() == LINEAR_PIECES_COLUMNS.keys() for row in rows)
    assert [row["model"] for row in rows] == ["relu"] * 4 + ["gelu"] * 4
    assert rows[0]["refusal"] is None
    assert rows[0]["points"] == 12
    assert 1 <= rows[0]["distinct_regions"] <= 12
    assert rows[0]["seconds"] > 0
    assert [row["perturbation"] for row in rows[:4]] == [0.001, 0.01, 0.1, 1.0]
    assert rows[0]["inside"] >= rows[3]["inside"] > 0
    assert 1e-10 < rows[0]["max_error_float32"] < 1e-5
    assert rows[3]["max_error_float64"] < 1e-13 < rows[3]["max_error_everywhere"]
    assert rows[0]["max_error_float64"] < 1e-13
    assert "gelu" in rows[4]["refusal"]
    assert rows[4]["distinct_regions"] is rows[4]["seconds"] is rows[4]["inside"] is None
    assert rows[7]["max_error_float64"] > 1e-4
    # A first-order model's error grows with the square of the step, 0.01 → 0.1.
    assert 60 < rows[6]["max_error_float64"] / rows[5]["max_error_float64"] < 160


def test_pieces_are_products_of_masked_matrices_and_a_unit_at_its_kink_is_off():
    torch.manual_seed(1)
    config = MLPConfig(num_features=3, hidden_size=5, num_hidden_layers=2, hidden_act="relu", num_labels=2)
    network, inputs = MLPForClassification(config).double().eval(), torch.randn(4, 3, dtype=torch.float64)
    with torch.no_grad():
        network.layers[0].linear.weight[0] = network.layers[0].linear.bias[0] = 0.0  # at its kink, whatever the input
    weight, bias = first_order_models(network, inputs)
    pattern = activation_pattern(network, inputs)
    assert not pattern[:, 0].any()
    first, second = (layer.linear for layer in network.layers)
    for row, on, w, b in zip(inputs, pattern.double(), weight, bias, strict=True):
        inner = on[5:, None] * second.weight @ (on[:5, None] * first.weight)
        torch.testing.assert_close(w, network.classifier.weight @ inner)
        torch.testing.assert_close(w @ row + b, network(row[None]).logits[0])


def test_other_networks_are_refused():
    network = SimpleNamespace(load=lambda: torch.nn.Linear(3, 2))
    data = SimpleNamespace(test=SimpleNamespace(features=torch.randn(2, 3)))
    with pytest.raises(TypeError, match="linear pieces are those of an MLPForClassification, got Linear"):
        LINEAR_PIECES.measure({"x": network}, BENCHMARKS["mlp-digits"], data, LINEAR_PIECES.settings())
