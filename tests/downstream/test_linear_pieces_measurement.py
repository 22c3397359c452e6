"""Rows of the linear-pieces and certificate measurements on tiny networks."""

from types import SimpleNamespace

import pytest
import torch

from hf_lgelu.benchmarks.table import BENCHMARKS
from hf_lgelu.downstream.certificate import CERTIFICATE, CERTIFICATE_COLUMNS
from hf_lgelu.downstream.linear_pieces import LINEAR_PIECES, LINEAR_PIECES_COLUMNS
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
    assert rows[0]["max_error_float64"] < 1e-13
    assert "gelu" in rows[4]["refusal"]
    assert rows[7]["max_error_float64"] > 1e-4


def test_certificate_rows():
    (row,) = measured(CERTIFICATE, "lambda_gelu")
    assert row.keys() == CERTIFICATE_COLUMNS.keys()
    assert row["bound"] >= row["input_bound"] >= row["measured"] > 0
    assert row["ratio"] == pytest.approx(row["bound"] / row["measured"])
