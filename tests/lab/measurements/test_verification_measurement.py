"""Rows of the verification measurement on networks small enough to know the answers."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lgelu_lab.benchmarks.data import BenchmarkData, FeatureRows
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements.verification import (
    MarabouNetwork,
    UnreadableNetworkError,
    VerificationSettings,
    Verifier,
    box_around,
    find_adversarial,
    measure_verification,
    pixel_units,
)
from torch import nn

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


def diamond():
    """Class 1 where |x0| + |x1| > 1, else class 0."""
    network = MLPForClassification(MLPConfig(num_features=2, hidden_size=4, num_hidden_layers=1, hidden_act="relu"))
    hidden, classifier = network.layers[0].linear, network.classifier
    hidden.weight.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    classifier.weight.data = torch.tensor([[0.0] * 4, [1.0] * 4])
    hidden.bias.data, classifier.bias.data = torch.zeros(4), torch.tensor([1.0, 0.0])
    return network.eval()


@pytest.fixture(scope="module")
def verifier():
    return Verifier(diamond(), torch.zeros(1, 2), VerificationSettings())


def asked_about(verifier, point, radius, attack):
    """The answer about the ball, and the point as a tensor."""
    features, ends = torch.tensor(point), torch.tensor([9.0, 9.0]).double()
    label = verifier.model(features[None]).logits.argmax().item()
    lower, upper = box_around(features, torch.tensor(radius, dtype=torch.float64), -ends, ends)
    if attack:
        return verifier.settle(features, label, lower, upper), features
    inner = torch.from_numpy(lower).float(), torch.from_numpy(upper).float()
    return verifier.ask_solver(features, label, lower, upper, inner), features


# (0.2, 0.1) leaves the diamond at (1 − 0.3)/2. (2, 0.5) enters it at 1: the second |x| is 0 from 0.5 on.
@pytest.mark.parametrize(("point", "radius"), [([0.2, 0.1], 0.35), ([2.0, 0.5], 1.0), ([-0.75, -1.5], 0.625)])
@pytest.mark.parametrize("attack", [False, True])
def test_proved_just_below_the_exact_radius_and_refuted_just_above(verifier, point, radius, attack):
    below, _ = asked_about(verifier, point, 0.999 * radius, attack)
    above, features = asked_about(verifier, point, 1.001 * radius, attack)
    assert (below.status, above.status) == ("proved", "refuted")
    assert above.by in (("attack", "search") if attack else ("search",))
    found = above.counterexample
    assert (found - features).abs().max() <= 1.002 * radius
    predicted = [verifier.model(each[None]).logits.argmax().item() for each in (features, found)]
    assert predicted[0] != predicted[1]


@pytest.mark.parametrize(("said", "status"), [("TIMEOUT", "timeout"), ("ERROR", "unknown"), ("sat", "unconfirmed")])
def test_what_is_not_settled_counts_as_neither(verifier, monkeypatch, said, status):
    point = np.zeros(2) if said == "sat" else None  # of the same class in torch
    monkeypatch.setattr(MarabouNetwork, "find_lead", lambda *args: (said, point))
    assert asked_about(verifier, [0.2, 0.1], 0.5, attack=False)[0].status == status


def test_the_attack_begins_at_the_input_and_stays_in_the_box():
    network, start = diamond(), torch.tensor([0.2, 0.1])
    found = find_adversarial(network, start - 0.4, start + 0.4, start, 0, seed=0)
    assert found.abs().sum() > 1
    assert (found - start).abs().max() <= 0.4
    assert find_adversarial(network, start - 0.3, start + 0.3, start, 0, seed=0) is None
    assert torch.equal(find_adversarial(network, start, start, start, 1, seed=0), start)


def test_a_network_that_is_read_as_another_is_refused(monkeypatch):
    monkeypatch.setattr(MarabouNetwork, "_calculated_bounds", lambda network, seconds: {})
    with pytest.raises(UnreadableNetworkError, match="Marabou reads another network than torch runs"):
        Verifier(diamond(), torch.zeros(1, 2), VerificationSettings())
    with pytest.raises(TypeError, match="an MLPForClassification is verified, got Linear"):
        Verifier(nn.Linear(2, 2), torch.zeros(1, 2), VerificationSettings())


def test_a_smooth_network_is_a_row_with_marabous_words(measured):
    row = measured[0]
    assert row["model"] == "gelu"
    assert "Operation Gelu not implemented" in row["refusal"]
    assert {name for name, value in row.items() if value is not None} == {"model", "refusal"}


def test_pixels_in_features_by_column_and_overall():
    scale, lowest, highest = pixel_units({"mean": MEAN, "deviation": DEVIATION}, 16.0, 3)
    assert scale.tolist() == [8.0, 4.0, 0.0]
    assert lowest.tolist() == [-2.0, -2.0, 0.0]
    assert highest.tolist() == [6.0, 2.0, 0.0]
    scale, lowest, highest = pixel_units({"mean": 51.0, "deviation": 102.0}, 255.0, 2)
    assert (scale.tolist(), lowest.tolist(), highest.tolist()) == ([2.5, 2.5], [-0.5, -0.5], [2.0, 2.0])
