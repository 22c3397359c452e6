"""What an evaluation reports of a model and its ReLU substitution, against plain loops over deep copies."""

import copy
import math

import numpy as np
import pytest
import torch
from plain_evaluation import SAMPLES, accuracy, by_hand, substituted
from tiny_training import CLASSES, batch, tiny_model, tiny_trainer
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_lgelu import anneal_hardness, replace_activations
from hf_lgelu.networks.smooth_calls import find_smooth_calls
from hf_lgelu.training.evaluation import compare_samples, comparison_metrics


@pytest.mark.parametrize("hardened", [None, 0.02, 1.0])
def test_report_equals_a_plain_loop(tmp_path, hardened):
    model = tiny_model(seed=3)
    if hardened is not None:
        anneal_hardness(model, hardened)
    logits, hits, loss = by_hand(copy.deepcopy(model), SAMPLES)
    relu_logits, relu_hits, relu_loss = by_hand(substituted(model), SAMPLES)
    metrics = tiny_trainer(tmp_path, model, eval_dataset=SAMPLES, compute_metrics=accuracy).evaluate()
    assert metrics["eval_accuracy"] == pytest.approx(hits, rel=1e-12)
    assert metrics["eval_relu_accuracy"] == pytest.approx(relu_hits, rel=1e-12)
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["eval_relu_loss"] == pytest.approx(relu_loss, rel=1e-6)
    change = (logits - relu_logits).abs().max().item()
    assert metrics["eval_relu_max_logit_change"] == pytest.approx(change, rel=1e-3, abs=1e-6)
    unchanged = (logits.argmax(-1) == relu_logits.argmax(-1)).double().mean().item()
    assert metrics["eval_relu_unchanged_predictions"] == pytest.approx(unchanged, rel=1e-6)
    outputs, relu = [], substituted(model)
    for gate in (module for module in relu.modules() if isinstance(module, nn.ReLU)):
        gate.register_forward_hook(lambda module, inputs, output: outputs.append(output.flatten()))
    by_hand(relu, SAMPLES)
    live = (torch.cat(outputs) != 0).double().mean().item()
    assert metrics["eval_relu_live_units"] == pytest.approx(live, rel=1e-6)
    if hardened is None:  # the two halves of the report differ, so that a mix-up would show
        assert unchanged < 1
        assert hits != relu_hits
        assert change > 0.3
    if hardened == 1.0:
        assert change < 0.01


@pytest.mark.parametrize("option", [{}, {"prediction_loss_only": True, "compute_metrics": accuracy}])
def test_without_metrics_losses_and_changes_are_reported(tmp_path, option):
    model = tiny_model(seed=3)
    metrics = tiny_trainer(tmp_path, model, eval_dataset=SAMPLES, **option).evaluate()
    logits, _, _ = by_hand(copy.deepcopy(model), SAMPLES)
    relu_logits, _, relu_loss = by_hand(substituted(model), SAMPLES)
    assert metrics["eval_relu_loss"] == pytest.approx(relu_loss, rel=1e-6)
    change = (logits - relu_logits).abs().max().item()
    assert metrics["eval_relu_max_logit_change"] == pytest.approx(change, rel=1e-5)
    assert not any("accuracy" in name for name in metrics)


@pytest.mark.parametrize("options", [{}, {"prediction_loss_only": True}, {"eval_do_concat_batches": False}])
def test_of_no_rows_trainers_metrics_are_all(tmp_path, options):
    options |= {"eval_dataset": [], "compute_metrics": accuracy}
    expected = tiny_trainer(tmp_path, plain=True, **options).evaluate().keys()
    found = tiny_trainer(tmp_path, **options).evaluate()
    assert {name for name in found if "relu_model_preparation_time" not in name} == expected
    assert tiny_trainer(tmp_path, **options).predict([]).predictions is None


def test_without_labels_only_the_changes_are_reported(tmp_path):
    unlabelled = [{"features": sample["features"]} for sample in SAMPLES]
    model = tiny_model(seed=3)
    metrics = tiny_trainer(tmp_path, model, eval_dataset=unlabelled).evaluate()
    assert {name for name in metrics if "relu" in name} == {
        "eval_relu_live_units",
        "eval_relu_max_logit_change",
        "eval_relu_unchanged_predictions",
    }
    assert "eval_loss" not in metrics


def test_preprocessing_of_logits_applies_to_both(tmp_path):
    model, shapes = tiny_model(seed=3), []

    def to_classes(logits, labels):
        shapes.append((tuple(logits.shape), tuple(labels.shape)))
        return logits.argmax(-1)

    def agreement(prediction):
        assert prediction.predictions.shape == (11,)
        return {"agreement": float((prediction.predictions == prediction.label_ids).mean())}

    metrics = tiny_trainer(
        tmp_path, model, eval_dataset=SAMPLES, compute_metrics=agreement, preprocess_logits_for_metrics=to_classes
    ).evaluate()
    assert metrics["eval_agreement"] == pytest.approx(by_hand(copy.deepcopy(model), SAMPLES)[1])
    assert metrics["eval_relu_agreement"] == pytest.approx(by_hand(substituted(model), SAMPLES)[1])
    assert shapes == [((size, CLASSES), (size,)) for size in (4, 4, 4, 4, 3, 3)]
    assert metrics["eval_relu_max_logit_change"] > 0.3


def test_metrics_of_the_losses_get_those_of_each_network(tmp_path):
    """Perplexity from the losses: the substituted one must not be that of the soft network."""
    model = tiny_model(seed=3)

    def perplexity(prediction):
        return {"perplexity": float(np.exp(prediction.losses.mean()))}

    metrics = tiny_trainer(
        tmp_path, model, eval_dataset=SAMPLES, compute_metrics=perplexity, include_for_metrics=["loss"]
    ).evaluate()
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]), rel=1e-5)
    assert metrics["eval_relu_perplexity"] == pytest.approx(math.exp(metrics["eval_relu_loss"]), rel=1e-5)
    assert metrics["eval_relu_perplexity"] != pytest.approx(metrics["eval_perplexity"], rel=1e-2)


def test_metric_names_with_the_prefix_are_understood(tmp_path):
    trainer = tiny_trainer(
        tmp_path, eval_dataset={"a": SAMPLES}, compute_metrics=lambda prediction: {"eval_a_x": 1.0, "y": 2.0}
    )
    metrics = trainer.evaluate()
    assert [metrics[f"eval_a_{name}"] for name in ("x", "relu_x", "y", "relu_y")] == [1, 1, 2, 2]


def test_label_smoothing_and_the_substituted_loss(tmp_path):
    """Smoothing takes the labels out of the inputs; the second pass must find them again."""
    model = tiny_model(seed=3)
    metrics = tiny_trainer(tmp_path, model, eval_dataset=SAMPLES, label_smoothing_factor=0.1).evaluate()
    relu_logits, _, relu_loss = by_hand(substituted(model), SAMPLES)
    uniform = -F.log_softmax(relu_logits, -1).mean().item()
    assert metrics["eval_relu_loss"] == pytest.approx(0.9 * relu_loss + 0.1 * uniform, rel=1e-5)


# Rows


def test_rows_and_their_metrics_by_hand():
    logits = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    other = torch.tensor([[1.5, 1.0], [3.0, 0.25], [0.0, 1.0]])
    rows = compare_samples(torch.tensor(0.5), logits, torch.tensor(0.75), other, torch.tensor([1, 0, 1]), 3)
    expected = [[0.5, 0.75, 1.0, 0, 1], [0.5, 0.75, 0.25, 1, 1], [0.5, 0.75, 0, 1, 1]]
    assert rows[:, :5].tolist() == expected
    metrics = comparison_metrics(rows.numpy(), "eval", loss=0.5)
    assert metrics == {
        "eval_relu_max_logit_change": 1.0,
        "eval_relu_unchanged_predictions": pytest.approx(2 / 3),
        "eval_relu_loss": 0.75,
    }


HALF, MASKED, NAN = torch.tensor([[1024.0, 0.0]], dtype=torch.float16), torch.tensor([[-math.inf, 1.0, 2.0]]), math.nan
# Two images of 1 × 3 pixels and two classes: of the first the second pixel turns round, the third has no label.
MAPS = torch.tensor([[[[1.0, 1.0, 1.0]], [[0.0, 0.0, 0.0]]], [[[0.0, 0.0, 0.0]], [[2.0, 2.0, 2.0]]]])
TURNED = torch.tensor([[[[1.0, 1.0, 1.0]], [[0.0, 1.5, 9.0]]], [[[0.0, 0.0, 0.0]], [[2.0, 2.0, 2.0]]]])
SCORES, TOKENS = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[5, 28, 0], [5, 7, 7]])
COMPARED = {  # (outputs, those of ReLU, labels, of each row the largest change, predictions that stay, and all)
    "half precision, in float32": (HALF, torch.tensor([[-65504.0, 0.0]]).half(), None, [[66528, 0, 1]]),
    "a masked class": (MASKED, MASKED + torch.tensor([0.0, 0.5, 0.0]), None, [[0.5, 1, 1]]),
    "a place without a label, whatever is there": (
        torch.zeros(1, 3, 2), torch.tensor([[[0.5, 0.0], [NAN, 7.0], [0.0, 0.25]]]), torch.tensor([[0, -100, 1]]),
        [[0.5, 1, 2]],
    ),
    "a regression's targets, which mask nothing": (
        torch.ones(3, 1), -torch.ones(3, 1), torch.tensor([0.3, -100.5, 2.0]), [[2, 0, 0]] * 3
    ),
    "maps": (MAPS, TURNED, torch.tensor([[[0, 0, -100]], [[1, 1, 1]]]), [[1.5, 1, 2], [0, 3, 3]]),
    "maps without labels": (MAPS, TURNED, None, [[9.0, 1, 3], [0, 3, 3]]),
    "real labels, which make no classes": (SCORES, SCORES.flip(1), torch.zeros(2, 2), [[1, 0, 0], [3, 0, 0]]),
    "generated tokens, row by row": (TOKENS, torch.tensor([[5, 28, 0], [5, 0, 7]]), None, [[-1, 1, 1], [-1, 0, 1]]),
    "longer ones": (TOKENS, torch.zeros(2, 4, dtype=torch.long), None, [[-1, 0, 1], [-1, 0, 1]]),
}  # fmt: skip


@pytest.mark.parametrize(("outputs", "others", "labels", "rows"), COMPARED.values(), ids=COMPARED)
def test_what_is_compared_of_a_row(outputs, others, labels, rows):
    found = compare_samples(None, outputs, None, others, labels, len(rows))
    assert found[:, 2:5].tolist() == rows
    kept, all_places = (sum(row[column] for row in rows) for column in (1, 2))
    share = comparison_metrics(found.numpy(), "eval").get("eval_relu_unchanged_predictions")
    assert share == (pytest.approx(kept / all_places) if all_places else None)


def test_a_prediction_of_nan_is_no_prediction_that_stayed():
    logits = torch.tensor([[math.nan, 1.0], [0.0, 1.0], [0.0, 1.0]])
    other = torch.tensor([[math.nan, 1.0], [0.0, math.nan], [0.0, 1.0]])
    rows = compare_samples(None, logits, None, other, None, 3)
    assert rows[:, 3].tolist() == [0, 0, 1]
    metrics = comparison_metrics(rows.numpy(), "eval")
    assert metrics["eval_relu_unchanged_predictions"] == pytest.approx(1 / 3)
    assert math.isnan(metrics["eval_relu_max_logit_change"])


def test_the_substituted_loss_is_of_the_rows_that_trainers_is_of():
    """Trainer leaves out batches whose loss is no number, or reports none. A NaN of ReLU's own stays."""
    losses = torch.tensor([[0.5, 0.75], [math.nan, math.nan], [1.5, 2.0]])
    rows = torch.cat([compare_samples(loss, (), relu_loss, (), None, 2) for loss, relu_loss in losses])
    assert comparison_metrics(rows.numpy(), "eval", loss=1.0) == {"eval_relu_loss": 1.375}
    assert math.isnan(comparison_metrics(rows.numpy(), "eval", loss=math.nan)["eval_relu_loss"])
    rows[0, 1] = math.nan
    assert math.isnan(comparison_metrics(rows.numpy(), "eval", loss=1.0)["eval_relu_loss"])


# Which gates are substituted


@pytest.mark.parametrize("activation", ["gelu", "silu", "gelu_pytorch_tanh"])
def test_a_smooth_baseline_reports_the_plain_swap(tmp_path, activation):
    model = tiny_model(activation, seed=3)
    relu = copy.deepcopy(model)
    for index in range(2):
        relu.activations[index] = nn.ReLU()
    metrics = tiny_trainer(
        tmp_path, model, eval_dataset=SAMPLES, compute_metrics=accuracy, require_lambda_gelu=False
    ).evaluate()
    logits, relu_logits = (by_hand(each, SAMPLES)[0] for each in (model, relu))
    change = (logits - relu_logits).abs().max().item()
    assert change > 0.1
    assert metrics["eval_relu_max_logit_change"] == pytest.approx(change, rel=1e-5)
    assert metrics["eval_relu_accuracy"] == pytest.approx(by_hand(relu, SAMPLES)[1])


def test_beside_lambda_gelu_other_gates_stay_as_substitute_relu_leaves_them(tmp_path):
    model: PreTrainedModel = tiny_model("gelu", seed=3)
    replace_activations(model, include=lambda name: name == "activations.0", rewrite_config=False)
    anneal_hardness(model, 1.0)
    relu = substituted(model)
    assert find_smooth_calls(relu, batch(SAMPLES)["features"])  # the GELU is still there
    metrics = tiny_trainer(tmp_path, model, eval_dataset=SAMPLES).evaluate()
    change = (by_hand(model, SAMPLES)[0] - by_hand(relu, SAMPLES)[0]).abs().max().item()
    assert 0 < change < 0.01
    assert metrics["eval_relu_max_logit_change"] == pytest.approx(change, rel=1e-2, abs=1e-6)


@pytest.mark.parametrize(
    ("activation", "off"), [("relu", "require_lambda_gelu"), ("lambda_gelu", "report_substitution")]
)
def test_where_nothing_is_substituted_nothing_is_reported_of_it(tmp_path, activation, off):
    model = tiny_model(activation)
    metrics = tiny_trainer(tmp_path, model, eval_dataset=SAMPLES, compute_metrics=accuracy, **{off: False}).evaluate()
    assert "eval_accuracy" in metrics
    assert not any("relu" in name for name in metrics)
