"""Rows of the int8 measurement on two tiny networks."""

import json
from dataclasses import dataclass

import pytest
import torch
from lgelu_lab.benchmarks.data import BenchmarkData, FeatureRows
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements.int8 import INT8_COLUMNS, PRECISIONS, Int8Settings, measure_int8
from torch import nn

from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

DIGITS = BENCHMARKS["mlp-digits"]
SETTINGS = Int8Settings(
    calibration_rows=20, batch_sizes=(1, 3), rounds=4, min_round_seconds=1e-5, evaluation_batch_size=16, seed=3
)


@dataclass
class InMemory:
    network: nn.Module

    def load(self):
        return self.network.eval()


def network(activation):
    torch.manual_seed(1)
    return MLPForClassification(
        MLPConfig(num_features=6, hidden_size=8, num_hidden_layers=2, hidden_act=activation, num_labels=3)
    )


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    train, held_out = (FeatureRows(torch.randn(n, 6), torch.randint(3, (n,))) for n in (30, 41))
    return BenchmarkData(train, held_out, "test", ("a", "b", "c"))


@pytest.fixture(scope="module")
def measured(data):
    models = {name: InMemory(network(name)) for name in ("gelu", "relu")}
    return measure_int8(models, DIGITS, data, SETTINGS)


def test_every_network_precision_and_batch_size_has_one_complete_row(measured):
    keys = [(row["model"], row["precision"], row["batch_size"]) for row in measured]
    assert keys == [(m, p, b) for m in ("gelu", "relu") for p in PRECISIONS for b in (1, 3)]
    assert all(tuple(sorted(row)) == tuple(sorted(INT8_COLUMNS)) for row in measured)
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured


def test_scores_are_what_a_plain_loop_counts(measured, data):
    for row in measured:
        model = network(row["model"]).eval()
        right = [
            int(model(x[None]).logits.argmax()) == int(y)
            for x, y in zip(data.eval.features, data.eval.labels, strict=True)
        ]
        assert row["evaluated_rows"] == 41
        if row["precision"] == "float32":
            assert (row["score"], row["same_argmax"]) == (sum(right) / 41, 1.0)
            assert row["max_logit_difference"] < 1e-6
        else:
            assert (
                1e-5 < row["max_logit_difference"] < 0.1 * max(1, model(data.eval.features).logits.abs().max().item())
            )
            assert abs(row["score"] - sum(right) / 41) <= 1 - row["same_argmax"] + 1e-12


def test_relu_vanishes_in_int8_alone(measured):
    found = {
        (row["model"], row["precision"]): (row["activations"], row["float_activations"], row["integer_layers"])
        for row in measured
    }
    assert found["gelu", "float32"] == found["relu", "float32"] == (2, 2, 0)
    assert found["gelu", "int8-all"] == (2, 2, 3)
    assert found["relu", "int8-all"] == (2, 0, 3)
