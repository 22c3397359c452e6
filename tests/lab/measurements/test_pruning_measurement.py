"""Rows of the measurements `zeros` and `pruning` on small networks with known dead units."""

from dataclasses import dataclass

import pytest
import torch
from lgelu_lab.benchmarks.data import BenchmarkData, FeatureRows
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements.pruning import (
    PRUNING_COLUMNS,
    PruningSettings,
    chosen_units,
    measure_pruning,
    without_units,
)
from lgelu_lab.measurements.zeros import ZEROS_COLUMNS, ZerosSettings, count_zeros, measure_network_zeros
from torch import nn

from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

BENCHMARK = BENCHMARKS["mlp-digits"]


@dataclass
class InMemory:
    hidden_act: str

    def load(self):
        torch.manual_seed(0)
        config = MLPConfig(num_features=3, hidden_size=8, num_hidden_layers=2, hidden_act=self.hidden_act, num_labels=2)
        network = MLPForClassification(config)
        with torch.no_grad():
            network.layers[0].linear.bias.fill_(0.3)
            network.layers[0].linear.bias[[2, 5, 6]] = -100.0
            network.layers[1].linear.bias.fill_(5.0)
        return network.eval()


@pytest.fixture
def data():
    features = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    train = FeatureRows(features[:40], (features[:40, 0] > 0).long())
    test = FeatureRows(features[40:], (features[40:, 0] > 0).long())
    return BenchmarkData(train, test, test, "test", "test", ("a", "b"), {})


@pytest.fixture
def models():
    return {"gelu": InMemory("gelu"), "relu": InMemory("relu")}


def test_zeros_of_each_layer(models, data):
    rows = measure_network_zeros(models, BENCHMARK, data, ZerosSettings(batch_size=7))
    assert [(row["model"], row["gate"], row["layer"]) for row in rows[1:3]] == [
        ("gelu", "gelu", "layers.1.activation"),
        ("relu", "relu", "layers.0.activation"),
    ]
    relu = rows[2]
    layer = models["relu"].load().layers[0].linear
    outputs = (data.train.features @ layer.weight.T + layer.bias).tolist()
    off = sum(value <= 0 for row in outputs for value in row)
    assert relu["apoz"] == relu["off_fraction"] == pytest.approx(off / (40 * 8), rel=1e-12)
    assert (relu["dead_units"], relu["never_on_units"], relu["units"], relu["values"]) == (3, 3, 8, 40)
    assert rows[3]["apoz"] == 0
    assert all(row.keys() == ZEROS_COLUMNS.keys() for row in rows)


@pytest.mark.parametrize("hidden_act", ["relu", "gelu", "lambda_gelu"])
def test_counts_equal_a_loop_over_numbers(hidden_act, data):
    model = InMemory(hidden_act).load()
    found = count_zeros(model, [{"features": rows} for rows in data.train.features.split(7)], threshold=0.1)
    with torch.no_grad():
        first = model.layers[0](data.train.features)
    for unit, values in enumerate(first.T.tolist()):
        zeros = found["layers.0.activation"]
        counts = [sum(map(said, values)) for said in (lambda v: v == 0, lambda v: v <= 0, lambda v: abs(v) <= 0.1)]
        assert [int(each[unit]) for each in (zeros.zeros, zeros.off, zeros.near_zero)] == counts
        assert zeros.absolute_sum[unit].item() == pytest.approx(sum(map(abs, values)), rel=1e-6)
    assert (zeros.kind, zeros.values) == (hidden_act, 40)


def test_units_of_images_are_channels_and_later_calls_are_counted_apart():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.relu = nn.Conv2d(1, 2, 1), nn.Linear(3, 5), nn.ReLU()

        def forward(self, x):
            return self.relu(self.second(self.relu(self.first(x)).mean(1)))

    model = Twice()
    model.first.weight.data, model.first.bias.data = torch.tensor([1.0, -1.0]).reshape(2, 1, 1, 1), torch.zeros(2)
    model.second.weight.data, model.second.bias.data = torch.zeros(5, 3), torch.tensor([-1.0, 0.0, 1.0, 2.0, -2.0])
    x = torch.tensor([[1.0, 5.0, 2.0], [3.0, -4.0, 0.0]]).reshape(1, 1, 2, 3)  # the second channel has five zeros
    zeros = count_zeros(model, [{"x": x}, {"x": x}])
    assert {name: counts.zeros.tolist() for name, counts in zeros.items()} == {
        "relu": [2 * 2, 2 * 5],
        "relu#2": [4, 4, 0, 0, 4],
    }
    assert [counts.values for counts in zeros.values()] == [12, 4]


@pytest.fixture
def counted(models, data):
    """An MLP of 8-8 ReLUs, and its zeros on the training rows."""
    model = models["relu"].load()
    return model, list(count_zeros(model, [{"features": data.train.features}]).values())


@pytest.mark.parametrize(("fraction", "count"), [(0.25, 2), (0.5, 4), (0.99, 7), (1 - 1e-12, 7), (0.125, 1)])
@pytest.mark.parametrize("criterion", ["apoz", "magnitude"])
def test_a_fraction_takes_the_units_a_loop_would_take(counted, criterion, fraction, count):
    model, zeros = counted
    chosen = chosen_units(model, zeros, criterion=criterion, rule="fraction", fraction=fraction)
    for units, site, layer in zip(chosen, zeros, model.layers, strict=True):
        scores = (-site.off if criterion == "apoz" else layer.linear.weight.double().abs().sum(1)).tolist()
        assert units == sorted(sorted(range(8), key=lambda unit: (scores[unit], unit))[:count])


def test_one_sigma_takes_what_lies_above_the_deviation_of_the_units_at_hand(counted):
    model, zeros = counted
    for units, site in zip(chosen_units(model, zeros, criterion="apoz", rule="one-sigma"), zeros, strict=True):
        shares = (site.off.double() / site.values).numpy()
        assert units == [unit for unit, share in enumerate(shares) if share > shares.mean() + shares.std()]


def test_a_layer_that_is_wholly_dead_keeps_one_unit(counted):
    model, zeros = counted
    zeros[1].zeros[:] = zeros[1].values
    assert chosen_units(model, zeros, criterion="dead") == [[2, 5, 6], list(range(1, 8))]


def test_nothing_to_remove_and_other_networks_are_refused(counted):
    model, zeros = counted
    with pytest.raises(ValueError, match="no unit of MLPForClassification goes by dead"):
        chosen_units(model, zeros[1:], criterion="dead")
    with pytest.raises(TypeError, match="out of an MLPForClassification, got Sequential"):
        without_units(nn.Sequential(nn.Linear(2, 2)), [[0]])


@pytest.mark.parametrize("hidden_act", ["relu", "gelu"])
def test_without_units_is_the_network_with_these_at_zero(hidden_act, tmp_path, data):
    model = InMemory(hidden_act).load()
    pruned = without_units(model, [[1, 4], [0]])
    pruned.save_pretrained(tmp_path)
    again = MLPForClassification.from_pretrained(tmp_path)
    assert again.config.hidden_sizes == [6, 7]
    with torch.no_grad():
        found = again(data.test.features).logits
        model.layers[1].linear.weight[:, [1, 4]] = 0.0
        model.classifier.weight[:, [0]] = 0.0
        torch.testing.assert_close(found, model(data.test.features).logits)


def test_pruning_rows(models, data):
    settings = PruningSettings(fractions=(0.5,), finetune_epochs=1)
    rows = measure_pruning(models, BENCHMARK, data, settings)
    assert all(row.keys() == PRUNING_COLUMNS.keys() for row in rows)
    asked = [(row["criterion"], row["rule"], row["fraction"]) for row in rows]
    assert (
        asked[:5]
        == asked[5:]
        == [
            ("none", None, None),
            ("dead", None, None),
            ("apoz", "one-sigma", None),
            ("apoz", "fraction", 0.5),
            ("magnitude", "fraction", 0.5),
        ]
    )
    none, dead = rows[5], rows[6]
    assert (none["widths"], dead["widths"], rows[8]["widths"]) == ("8-8", "5-8", "4-4")
    assert dead["parameters_before"] - dead["parameters"] == 3 * (3 + 1 + 8)
    assert dead["calibration_max_logit_change"] < 1e-5
    assert dead["score_pruned"] == dead["score_before"]
    assert rows[8]["eval_max_logit_change"] > 0.01
    assert "smooth gates (gelu)" in rows[1]["refusal"]
    assert rows[1]["widths"] is rows[1]["score_finetuned"] is None
    assert all(0 <= row["score_finetuned"] <= 1 for row in rows if row["refusal"] is None)


def test_the_score_after_fine_tuning_is_that_of_the_tuned_network(models, data, monkeypatch):
    asked = []

    def say_the_second_class(model, benchmark, rows, arguments, seed):
        asked.append((rows, arguments, seed))
        with torch.no_grad():
            model.classifier.bias.copy_(torch.tensor([-1e6, 1e6]))

    monkeypatch.setattr("lgelu_lab.measurements.pruning.tune", say_the_second_class)
    settings = PruningSettings(fractions=(), finetune_epochs=4, seed=3)
    rows = measure_pruning({"relu": models["relu"]}, BENCHMARK, data, settings)
    tuned = [row for row in rows if row["refusal"] is None]
    assert {row["score_finetuned"] for row in tuned} == {data.eval.labels.sum().item() / 20}
    assert asked == [(data, {"num_train_epochs": 4}, 3)] * len(tuned)
