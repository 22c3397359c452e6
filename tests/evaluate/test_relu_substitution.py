"""Modules of the library evaluate: the comparison that this package ships, and a user's own metric in the trainer."""

import copy
from pathlib import Path

import evaluate
import numpy as np
import pytest
import torch
from plain_evaluation import SAMPLES, by_hand, substituted
from scipy.stats import binomtest, entropy
from tiny_training import tiny_model, tiny_trainer

import hf_lgelu

COMPARISON = Path(hf_lgelu.__file__).parent / "evaluate" / "relu_substitution"
ACCURACY = """
import datasets
import evaluate

class Accuracy(evaluate.Metric):
    def _info(self):
        features = {name: datasets.Value("int64") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=datasets.Features(features)
        )

    def _compute(self, predictions, references):
        return {"accuracy": sum(one == other for one, other in zip(predictions, references)) / len(references)}
"""


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    return evaluate.load(str(COMPARISON), cache_dir=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def accuracy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "accuracy"
    folder.mkdir()
    (folder / "accuracy.py").write_text(ACCURACY)
    return evaluate.load(str(folder), cache_dir=str(folder))


@pytest.fixture(scope="module")
def outputs():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(60, 4)).astype(np.float32)
    changed = logits + generator.normal(size=(60, 4)).astype(np.float32)
    return logits, changed, generator.integers(0, 4, 60)


def test_the_comparison_of_logits_equals_scipys(comparison, outputs):
    logits, changed, labels = outputs
    right, other_right = logits.argmax(1) == labels, changed.argmax(1) == labels
    lost, won = int((right & ~other_right).sum()), int((other_right & ~right).sum())
    assert lost != won != 0
    first, second = (np.exp(scores.astype(float)) for scores in (logits, changed))  # scipy divides by the sums
    assert comparison.compute(predictions1=logits, predictions2=changed, references=labels) == pytest.approx(
        {
            "unchanged_predictions": (logits.argmax(1) == changed.argmax(1)).mean(),
            "max_logit_change": abs(logits - changed).max(),
            "kl": entropy(first, second, axis=1).mean(),
            "only_right_1": lost,
            "only_right_2": won,
            "mcnemar_p": binomtest(lost, lost + won).pvalue,
        },
        rel=1e-6,
    )


def test_it_takes_batches_and_classes(comparison, outputs):
    logits, changed, labels = outputs
    whole = comparison.compute(predictions1=logits, predictions2=changed)
    assert whole.keys() == {"unchanged_predictions", "max_logit_change", "kl"}
    for part in range(0, 60, 25):
        comparison.add_batch(predictions1=logits[part : part + 25], predictions2=changed[part : part + 25])
    assert comparison.compute() == pytest.approx(whole, rel=1e-12)
    classes = [scores.argmax(1) for scores in (logits, changed)]
    found = comparison.compute(predictions1=classes[0], predictions2=classes[1], references=classes[0])
    unchanged = whole["unchanged_predictions"]
    assert found == pytest.approx(
        {
            "unchanged_predictions": unchanged,
            "only_right_1": round(60 * (1 - unchanged)),
            "only_right_2": 0,
            "mcnemar_p": 2.0 ** (1 - round(60 * (1 - unchanged))),
        },
        rel=1e-9,
    )
    same = comparison.compute(predictions1=classes[0], predictions2=classes[0], references=labels)
    assert (same["unchanged_predictions"], same["mcnemar_p"]) == (1, 1)


@pytest.mark.parametrize("options", [{}, {"batch_eval_metrics": True}])
def test_a_metric_of_evaluate_is_taken_for_compute_metrics(accuracy, tmp_path, options):
    model = tiny_model(seed=3)
    ignored = {"features": torch.zeros(5), "labels": torch.tensor(-100)}
    expected = [by_hand(network, SAMPLES)[1] for network in (copy.deepcopy(model), substituted(model))]
    assert expected[0] != expected[1]
    for metric in (accuracy, evaluate.combine([accuracy])):
        data = {"eval_dataset": [*SAMPLES, ignored]}
        metrics = tiny_trainer(tmp_path, model, compute_metrics=metric, **data, **options).evaluate()
        assert [metrics["eval_accuracy"], metrics["eval_relu_accuracy"]] == pytest.approx(expected, rel=1e-12)
    own = tiny_trainer(tmp_path, model, plain=True, **data).evaluate()
    assert metrics["eval_loss"] == pytest.approx(own["eval_loss"], rel=1e-6)
    assert metrics["eval_relu_loss"] != pytest.approx(metrics["eval_loss"], rel=1e-3)
