"""Rows of the measurement `conversion` against plain loops on small networks."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from lgelu_lab.benchmarks.data import BenchmarkData, FeatureRows
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements.conversion import CONVERSION_COLUMNS, ConversionSettings, measure_conversion
from lgelu_lab.measurements.networks import draw_calibration
from small_networks import convert_with

from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.models.surgery import substitute_relu

DIGITS = BENCHMARKS["mlp-digits"]
REFIT = ConversionSettings(rows=(32, 256, 1000), efforts=("refit",))


def network(activation="gelu"):
    torch.manual_seed(0)
    config = MLPConfig(num_features=5, hidden_size=12, num_hidden_layers=2, hidden_act=activation, num_labels=3)
    model = MLPForClassification(config).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(3.0)
    return model


def trained(activation):
    return SimpleNamespace(load=lambda: network(activation), record=SimpleNamespace(whole_seconds=7.5))


def both():
    return {"gelu": trained("gelu"), "hardened_relu": trained("relu")}


def rows_of(count, seed):
    features = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return FeatureRows(features, (features[:, 0] > 0).long())


@pytest.fixture(scope="module")
def data():
    test = rows_of(50, 1)
    return BenchmarkData(rows_of(300, 0), test, "test", ("a", "b", "c"))


@pytest.fixture(scope="module")
def measured(data):
    return measure_conversion(both(), DIGITS, data, REFIT)


def plain_swap():
    model = network()
    substitute_relu(model, kinds=("gelu",))
    return model


def compared(model, rows):
    """(accuracy, KL, agreement, largest change) against the GELU network, a row and a class at a time."""
    with torch.no_grad():
        before, after = (net(rows.features).logits.double() for net in (network(), model))
    kl = largest = right = same = 0.0
    for p, q, label in zip(before.tolist(), after.tolist(), rows.labels.tolist(), strict=True):
        logs = [[x - math.log(sum(map(math.exp, row))) for x in row] for row in (p, q)]
        kl += sum(math.exp(a) * (a - b) for a, b in zip(*logs, strict=True))
        largest = max(largest, *(abs(a - b) for a, b in zip(p, q, strict=True)))
        right += q.index(max(q)) == label
        same += q.index(max(q)) == p.index(max(p))
    return right / len(rows), kl / len(rows), same / len(rows), largest


def test_a_row_per_way_with_the_rows_that_there_are(measured):
    assert all(row.keys() == CONVERSION_COLUMNS.keys() for row in measured)
    assert [(row["model"], row["method"], row["rows"]) for row in measured] == [
        ("gelu", "original", None),
        ("gelu", "direct", None),
        ("gelu", "refit", 32),
        ("gelu", "refit", 256),
        ("gelu", "refit", 300),
        ("hardened_relu", "hardened", None),
    ]
    assert all(row["refusal"] is None for row in measured)
    assert [row["seconds"] is None for row in measured] == [True, True, *[False] * 4]
    assert measured[-1]["seconds"] == 7.5
    original = measured[0]
    assert (original["kl"], original["agreement"], original["max_logit_change"]) == (0, 1, 0)
    assert {row["original_score"] for row in measured} == {original["score"]}


def test_what_is_said_of_each_network_is_what_a_plain_loop_finds(measured, data):
    calibration = draw_calibration(data, 256, 0)
    refitted = convert_with(network(), calibration, data_collator=DIGITS.collate).model
    models = {1: plain_swap(), 3: refitted, 5: network("relu")}
    for place, model in models.items():
        score, kl, agreement, largest = compared(model, data.eval)
        row = measured[place]
        assert row["score"] == pytest.approx(score, abs=1e-12)
        assert row["kl"] == pytest.approx(kl, rel=1e-4)
        assert row["agreement"] == pytest.approx(agreement, abs=1e-12)
        assert row["max_logit_change"] == pytest.approx(largest, rel=1e-4)
    assert measured[0]["score"] == compared(network(), data.eval)[0]
    assert measured[3]["kl"] < 0.2 * measured[1]["kl"]


def test_what_is_refused_is_a_row_with_the_reason(data):
    rows = measure_conversion(both(), DIGITS, data, ConversionSettings(rows=(8, 64), efforts=("refit",)))
    refused = rows[2]
    assert (refused["method"], refused["rows"]) == ("refit", 8)
    assert "16" in refused["refusal"]
    values = ("score", "kl", "agreement", "max_logit_change", "seconds")
    assert [refused[key] for key in values] == [None] * 5
    assert rows[3]["refusal"] is None


def test_under_bfloat16_the_fit_is_the_same_and_the_comparison_is_of_rounded_networks(measured, data):
    rounded = measure_conversion(both(), DIGITS, data, dataclasses.replace(REFIT, rows=(256,), bf16=True))
    with torch.autocast("cpu", torch.bfloat16):
        expected = compared(plain_swap(), data.eval)
    found = rounded[1]
    assert found["method"] == "direct"
    assert found["kl"] == pytest.approx(expected[1], rel=1e-6)
    assert (found["score"], found["agreement"]) == pytest.approx((expected[0], expected[2]))
    assert found["kl"] != measured[1]["kl"]
    refits = [row["kl"] for rows in (measured, rounded) for row in rows if row["rows"] == 256]
    assert refits[1] == pytest.approx(refits[0], abs=2e-3)
