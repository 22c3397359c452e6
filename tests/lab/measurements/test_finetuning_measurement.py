"""Rows of the measurement `conversion-finetuning`: what each run begins with, sees, and ends as."""

from types import SimpleNamespace

import pytest
import torch
from lgelu_lab.benchmarks.data import BenchmarkData, FeatureRows
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements import conversion_finetuning
from lgelu_lab.measurements.conversion_finetuning import FINETUNING_COLUMNS, FinetuningSettings, measure_finetuning
from lgelu_lab.measurements.networks import draw_calibration, tune
from networks import convert_with

from hf_lgelu.models.hardening import hardness_profile
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.models.sites import find_sites
from hf_lgelu.models.substitution import substitute_relu

DIGITS = BENCHMARKS["mlp-digits"]
SETTINGS = FinetuningSettings(steps=(0, 3), learning_rates=(0.1, 0.02), rows=64, seed=4)


def network():
    torch.manual_seed(0)
    config = MLPConfig(num_features=5, hidden_size=12, num_hidden_layers=2, hidden_act="gelu", num_labels=2)
    return MLPForClassification(config).eval()


TRAINED = {"gelu": SimpleNamespace(load=network)}


class Watched(FeatureRows):
    """Rows that say which of them were taken."""

    taken: list

    def __getitems__(self, indices):
        self.taken.append(list(indices))
        return super().__getitems__(indices)


@pytest.fixture
def data():
    features = torch.randn(150, 5, generator=torch.Generator().manual_seed(0))
    labels = (features[:, 0] > 0).long()
    train, test = Watched(features[:100], labels[:100]), FeatureRows(features[100:], labels[100:])
    train.taken = []
    return BenchmarkData(train, test, "test", ("a", "b"), {})


def accuracy(model, rows):
    with torch.no_grad():
        return (model(rows.features).logits.argmax(-1) == rows.labels).sum().item() / len(rows)


def test_a_row_per_start_steps_and_learning_rate_and_the_same_training_rows_for_each(data, monkeypatch):
    orders = []

    def watched(*arguments):
        data.train.taken.clear()
        tune(*arguments)
        orders.append(list(data.train.taken))

    monkeypatch.setattr(conversion_finetuning, "tune", watched)
    rows = measure_finetuning(TRAINED, DIGITS, data, SETTINGS)
    assert all(row.keys() == FINETUNING_COLUMNS.keys() for row in rows)
    assert [(row["start"], row["steps"], row["learning_rate"]) for row in rows] == [
        *((start, 0, None) for start in ("direct", "refit", "gelu")),
        *((start, 3, rate) for rate in (0.1, 0.02) for start in ("direct", "refit", "anneal", "gelu")),
    ]
    assert [row["rows"] for row in rows] == [64 if row["start"] == "refit" else None for row in rows]
    assert all(row["refusal"] is None and row["seconds"] >= 0 for row in rows)
    swapped = network()
    substitute_relu(swapped, kinds=("gelu",))
    refitted = convert_with(network(), draw_calibration(data, 64, 4), data_collator=DIGITS.collate).model
    expected = [accuracy(model, data.eval) for model in (swapped, refitted, network())]
    assert [row["score"] for row in rows[:3]] == expected
    assert len(orders) == 8
    assert orders == [orders[0]] * 8
    assert [len(batch) for batch in orders[0]][:3] == [64, 36, 64]
    first_epoch = [*orders[0][0], *orders[0][1]]
    assert sorted(first_epoch) == list(range(100)) != first_epoch


def test_a_run_begins_and_ends_with_the_gates_that_its_start_names(data, monkeypatch):
    before, after = [], []

    def watched(model, *arguments):
        before.append({site.kind for site in find_sites(model)})
        weights = model.classifier.weight.clone()
        tune(model, *arguments)
        before[-1].add("trained" if not torch.equal(weights, model.classifier.weight) else "untouched")
        if "lambda_gelu" in before[-1]:
            after.extend(hardness_profile(model).values())

    scored = []
    evaluate = conversion_finetuning.evaluate
    monkeypatch.setattr(conversion_finetuning, "tune", watched)
    monkeypatch.setattr(
        conversion_finetuning,
        "evaluate",
        lambda model, *rest, **options: (
            scored.append({site.kind for site in find_sites(model)}) or evaluate(model, *rest)
        ),
    )
    measure_finetuning(TRAINED, DIGITS, data, FinetuningSettings(steps=(3,), learning_rates=(0.1,), rows=64))
    assert before == [{"trained"}, {"trained"}, {"lambda_gelu", "trained"}, {"gelu", "trained"}]
    assert after == pytest.approx([159.576912] * 2)  # 2/(ε√(2π)) at ε = 0.005
    assert scored == [set(), set(), set(), {"gelu"}]


def test_a_step_is_gradient_descent_by_the_recipe(data):
    rows = FeatureRows(data.train.features[:40], data.train.labels[:40])  # one batch
    few = BenchmarkData(rows, data.eval, "test", ("a", "b"), {})
    model = network()
    tune(model, DIGITS, few, {"max_steps": 1, "learning_rate": 0.5, "lr_scheduler_type": "constant"}, 0)
    oracle = network().double()
    logits = oracle(rows.features.double()).logits
    torch.nn.functional.cross_entropy(logits, rows.labels).backward()
    weight = oracle.classifier.weight
    expected = weight - 0.5 * (weight.grad + 1e-4 * weight)
    torch.testing.assert_close(model.classifier.weight.double(), expected, atol=1e-6, rtol=0)
    assert not model.training


def test_a_refused_refit_is_told_in_its_rows_and_the_others_run(data):
    settings = FinetuningSettings(steps=(0, 1), learning_rates=(0.1,), rows=8)
    rows = measure_finetuning(TRAINED, DIGITS, data, settings)
    refused = [row for row in rows if row["refusal"] is not None]
    assert [(row["start"], row["steps"], row["score"], row["seconds"]) for row in refused] == [
        ("refit", 0, None, None),
        ("refit", 1, None, None),
    ]
    assert all(row["score"] is not None for row in rows if row["start"] != "refit")
