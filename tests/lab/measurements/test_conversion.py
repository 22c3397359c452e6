"""Rows of the measurement `conversion` against plain loops on small networks."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from lgelu_lab.benchmarks.data import BenchmarkData, FeatureRows
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements.conversion import (
    CONVERSION_COLUMNS,
    ConversionSettings,
    batch_norms,
    measure_conversion,
    with_new_statistics,
)
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


class Normed(torch.nn.Module):
    """A BatchNorm in front of each gate, as in a ResNet."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.first, self.act = torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU()
        self.between, self.second = torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3)

    def forward(self, features, labels=None):
        return SimpleNamespace(logits=self.second(self.between(self.act(self.first(self.before(features))))))


def test_statistics_are_those_of_what_comes_behind_relu():
    model, rows = Normed().eval(), rows_of(256, 3)
    model.second.running_mean.fill_(7.0)  # of the smooth network, say
    found, _ = with_new_statistics(SimpleNamespace(model=model, benchmark=DIGITS), rows)
    assert type(found.act) is torch.nn.ReLU
    with torch.no_grad():
        inner = [model.before(half) for half in rows.features.split(128)]
        first = [(values - values.mean(0)) / (values.var(0, unbiased=False) + 1e-5).sqrt() for values in inner]
        behind = [model.between(torch.relu(values)) for values in first]
    for norm, halves in ((found.first, inner), (found.second, behind)):
        means, variances = ([getattr(half, what)(0) for half in halves] for what in ("mean", "var"))
        torch.testing.assert_close(norm.running_mean, sum(means) / 2)
        torch.testing.assert_close(norm.running_var, sum(variances) / 2)
    assert not found.training
    assert (model.second.running_mean == 7.0).all()
    assert torch.equal(found.between.weight, model.between.weight)
    assert len(batch_norms(found)) == 2
    assert batch_norms(network()) == []
