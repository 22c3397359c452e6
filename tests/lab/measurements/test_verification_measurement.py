"""Rows of the verification measurement on networks small enough to know the answers."""

from dataclasses import dataclass

import pytest
import torch
from lgelu_lab.benchmarks.data import BenchmarkData, FeatureRows
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements import verification
from lgelu_lab.measurements.verification import (
    VERIFICATION,
    VERIFICATION_COLUMNS,
    VerificationSettings,
    first_correct,
    measure_verification,
    pixel_units,
)
from torch import nn

from hf_lgelu.analysis.verification.robustness import RobustnessReport, RobustnessResult
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

MEAN, DEVIATION = [4.0, 8.0, 5.0], [2.0, 4.0, 0.0]


@dataclass
class InMemory:
    network: nn.Module

    def load(self):
        return self.network.eval()


def threshold_network(hidden_act):
    """Class 1 where the first pixel, standardized, is above 1, that is above 6 of 16."""
    config = MLPConfig(num_features=3, hidden_size=2, num_hidden_layers=1, hidden_act=hidden_act, num_labels=2)
    network = MLPForClassification(config)
    hidden, classifier = network.layers[0].linear, network.classifier
    hidden.weight.data = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    classifier.weight.data = torch.tensor([[0.0, 0.0], [1.0, -1.0]])
    hidden.bias.data, classifier.bias.data = torch.zeros(2), torch.tensor([1.0, 0.0])
    return network


def rows(pixels, labels):
    standardized = (torch.tensor(pixels) - torch.tensor(MEAN)) / torch.tensor([2.0, 4.0, 1.0])
    return FeatureRows(standardized, torch.tensor(labels))


@pytest.fixture(scope="module")
def data():
    # The distance of the first pixel to 6: 4.8, 1.6, (wrong class), 3.2 and 4.8, of 16: 0.3, 0.1, 0.2, 0.3.
    pixels = [[1.2, 0.0, 5.0], [7.6, 16.0, 5.0], [9.0, 3.0, 5.0], [2.8, 3.0, 5.0], [10.8, 8.0, 5.0]]
    test = rows(pixels, [0, 1, 0, 0, 1])
    others = rows([[12.0, 0.0, 5.0]] * 7, [1] * 7)
    return BenchmarkData(others, others, test, "test", "test", ("a", "b"), {"mean": MEAN, "deviation": DEVIATION})


@pytest.fixture(scope="module")
def measured(data):
    models = {"gelu": InMemory(threshold_network("gelu")), "relu": InMemory(threshold_network("relu"))}
    settings = VerificationSettings(epsilons=(0.05, 0.15, 0.25), points=3)
    return measure_verification(models, BENCHMARKS["mlp-digits"], data, settings)


def test_counts_follow_from_the_distances_in_shares_of_the_pixels_range(measured):
    counts = [(row["epsilon"], row["proved"], row["refuted"]) for row in measured if row["model"] == "relu"]
    assert counts == [(0.05, 3, 0), (0.15, 2, 1), (0.25, 1, 2)]
    for row in measured[1:]:
        assert row["points"] == 3
        assert row["misclassified"] == 1
        assert row["unconfirmed"] == row["timeout"] == row["unknown"] == 0
        assert row["refuted_by_attack"] <= row["refuted"]
        assert row["proved_by_bounds"] <= row["proved"]
        assert 0 < row["median_seconds"] <= row["max_seconds"]
        assert row["refusal"] is None


def test_every_setting_is_asked_for_and_every_answer_counted(data, monkeypatch):
    asked = {}
    answers = [
        ("proved", "bounds", 1.0),
        ("proved", "search", 2.0),
        ("refuted", "attack", 9.0),
        ("refuted", "search", 3.0),
    ]

    def answer(network, inputs, labels, **options):
        asked.update(options)
        results = [RobustnessResult(i, 0.1, *found) for i, found in enumerate(answers)]
        return RobustnessReport(tuple(results), options["margin"])

    monkeypatch.setattr(verification, "verify_robustness", answer)
    monkeypatch.setattr(verification, "marabou_refusal", lambda network, example: None)
    settings = VerificationSettings(epsilons=(0.1,), points=3, timeout_seconds=7.0, margin=0.25, seed=5)
    models = {"relu": InMemory(threshold_network("relu"))}
    (row,) = measure_verification(models, BENCHMARKS["mlp-digits"], data, settings)
    lowest, highest = asked.pop("input_range")
    assert (lowest.tolist(), highest.tolist()) == ([-2.0, -2.0, 0.0], [6.0, 2.0, 0.0])
    assert asked.pop("scale").tolist() == [8.0, 4.0, 0.0]
    assert asked == {"epsilons": (0.1,), "timeout_seconds": 7.0, "margin": 0.25, "seed": 5}
    assert (row["proved"], row["proved_by_bounds"], row["refuted"], row["refuted_by_attack"]) == (2, 1, 2, 1)
    assert (row["median_seconds"], row["max_seconds"]) == (2.5, 9.0)


def test_a_smooth_network_is_a_row_with_marabous_words(measured):
    row = measured[0]
    assert row["model"] == "gelu"
    assert "Operation Gelu not implemented" in row["refusal"]
    assert {name for name, value in row.items() if value is not None} == {"model", "refusal"}


def test_every_key_is_described(measured):
    assert len(measured) == 4
    assert all(row.keys() == VERIFICATION_COLUMNS.keys() for row in measured)
    assert all(VERIFICATION_COLUMNS.values())


def test_the_measurement_names_what_it_needs():
    assert VERIFICATION.settings() == VerificationSettings()
    assert set(VERIFICATION.benchmarks) <= BENCHMARKS.keys()
    assert {"gelu", "relu", "hardened_relu"} <= set(VERIFICATION.models)
    assert VERIFICATION.measure is measure_verification


def test_pixels_in_features_by_column_and_overall():
    scale, lowest, highest = pixel_units({"mean": MEAN, "deviation": DEVIATION}, 16.0, 3)
    assert scale.tolist() == [8.0, 4.0, 0.0]
    assert lowest.tolist() == [-2.0, -2.0, 0.0]
    assert highest.tolist() == [6.0, 2.0, 0.0]
    scale, lowest, highest = pixel_units({"mean": 51.0, "deviation": 102.0}, 255.0, 2)
    assert (scale.tolist(), lowest.tolist(), highest.tolist()) == ([2.5, 2.5], [-0.5, -0.5], [2.0, 2.0])


def test_the_first_correct_rows_in_order(data):
    network = threshold_network("relu").eval()
    inputs, labels, misclassified = first_correct(network, data, 3)
    assert torch.equal(inputs, data.test.features[[0, 1, 3]])
    assert labels.tolist() == [0, 1, 0]
    assert misclassified == 1
    assert first_correct(network, data, 2)[2] == 0
    with pytest.raises(ValueError, match="1 to 4"):
        first_correct(network, data, 5)
