"""What an evaluation reports of a model and its ReLU substitution, against plain loops over deep copies."""

import copy
import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import small_networks as networks
import torch
from plain_evaluation import SAMPLES, accuracy, by_hand, substituted
from tiny_training import ARGUMENTS, CLASSES, batch, tiny_model, tiny_trainer
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5ForConditionalGeneration,
    set_seed,
)

from hf_lgelu import (
    LambdaGELU,
    LambdaGELUTrainer,
    LambdaGELUTrainingArguments,
    MLPConfig,
    MLPForClassification,
    anneal_hardness,
    replace_activations,
    substitute_relu,
)
from hf_lgelu.networks.smooth_calls import find_smooth_calls
from hf_lgelu.training.trainer import metrics_of_module


@pytest.mark.parametrize("hardened", [None, 0.02, 1.0])
def test_report_equals_a_plain_loop(tmp_path, hardened):
    model = tiny_model(seed=3)
    if hardened is not None:
        anneal_hardness(model, hardened)
    _, hits, loss = by_hand(copy.deepcopy(model), SAMPLES)
    _, relu_hits, relu_loss = by_hand(substituted(model), SAMPLES)
    metrics = tiny_trainer(tmp_path, model, eval_dataset=SAMPLES, compute_metrics=accuracy).evaluate()
    assert metrics["eval_accuracy"] == pytest.approx(hits, rel=1e-12)
    assert metrics["eval_relu_accuracy"] == pytest.approx(relu_hits, rel=1e-12)
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["eval_relu_loss"] == pytest.approx(relu_loss, rel=1e-6)
    outputs, relu = [], substituted(model)
    for gate in (module for module in relu.modules() if isinstance(module, nn.ReLU)):
        gate.register_forward_hook(lambda module, inputs, output: outputs.append(output.flatten()))
    by_hand(relu, SAMPLES)
    live = (torch.cat(outputs) != 0).double().mean().item()
    assert metrics["eval_relu_live_units"] == pytest.approx(live, rel=1e-6)
    if hardened is None:  # the two halves of the report differ, so that a mix-up would show
        assert hits != relu_hits
        assert relu_loss != pytest.approx(loss, rel=1e-2)


SMOOTHED = {"label_smoothing_factor": 0.1}  # takes the labels out of the inputs


@pytest.mark.parametrize("option", [{}, {"prediction_loss_only": True, "compute_metrics": accuracy}, SMOOTHED])
def test_without_metrics_losses_and_live_units_are_reported(tmp_path, option):
    model = tiny_model(seed=3)
    metrics = tiny_trainer(tmp_path, model, eval_dataset=SAMPLES, **option).evaluate()
    logits, _, loss = by_hand(substituted(model), SAMPLES)
    share = 0.1 if option is SMOOTHED else 0.0
    expected = (1 - share) * loss - share * logits.log_softmax(-1).mean().item()
    assert metrics["eval_relu_loss"] == pytest.approx(expected, rel=1e-6)
    assert {name for name in metrics if "relu" in name} == {"eval_relu_live_units", "eval_relu_loss"}
    assert not any("accuracy" in name for name in metrics)


@pytest.mark.parametrize("options", [{}, {"prediction_loss_only": True}, {"eval_do_concat_batches": False}])
def test_of_no_rows_trainers_metrics_are_all(tmp_path, options):
    options |= {"eval_dataset": [], "compute_metrics": accuracy}
    expected = tiny_trainer(tmp_path, plain=True, **options).evaluate().keys()
    found = tiny_trainer(tmp_path, **options).evaluate().keys()
    assert found == expected
    assert tiny_trainer(tmp_path, **options).predict([]).predictions is None


def test_without_labels_only_the_live_units_are_reported(tmp_path):
    unlabelled = [{"features": sample["features"]} for sample in SAMPLES]
    metrics = tiny_trainer(tmp_path, tiny_model(seed=3), eval_dataset=unlabelled).evaluate()
    assert {name for name in metrics if "relu" in name} == {"eval_relu_live_units"}
    assert "eval_loss" not in metrics


def test_metric_names_with_the_prefix_are_understood(tmp_path):
    trainer = tiny_trainer(
        tmp_path, eval_dataset={"a": SAMPLES}, compute_metrics=lambda prediction: {"eval_a_x": 1.0, "y": 2.0}
    )
    metrics = trainer.evaluate()
    assert [metrics[f"eval_a_{name}"] for name in ("x", "relu_x", "y", "relu_y")] == [1, 1, 2, 2]


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
    _, hits, loss = by_hand(relu, SAMPLES)
    assert metrics["eval_relu_loss"] == pytest.approx(loss, rel=1e-6) != metrics["eval_loss"]
    assert metrics["eval_relu_accuracy"] == pytest.approx(hits)


def test_beside_lambda_gelu_other_gates_stay_as_substitute_relu_leaves_them(tmp_path):
    model: PreTrainedModel = tiny_model("gelu", seed=3)
    replace_activations(model, include=lambda name: name == "activations.0")
    relu = substituted(model)
    assert find_smooth_calls(relu, batch(SAMPLES)["features"])  # the GELU is still there
    metrics = tiny_trainer(tmp_path, model, eval_dataset=SAMPLES).evaluate()
    assert metrics["eval_relu_loss"] == pytest.approx(by_hand(relu, SAMPLES)[2], rel=1e-6) != metrics["eval_loss"]


@pytest.mark.parametrize(
    ("activation", "off"), [("relu", "require_lambda_gelu"), ("lambda_gelu", "report_substitution")]
)
def test_where_nothing_is_substituted_nothing_is_reported_of_it(tmp_path, activation, off):
    model = tiny_model(activation)
    metrics = tiny_trainer(tmp_path, model, eval_dataset=SAMPLES, compute_metrics=accuracy, **{off: False}).evaluate()
    assert "eval_accuracy" in metrics
    assert not any("relu" in name for name in metrics)


# What models give


@pytest.mark.parametrize("labelled", [6, 3])
def test_a_metric_of_a_language_model_sees_the_labels_that_its_loss_sees(labelled):
    """transformers' own loss of logits that are 0 and 1000 is 1000 times the share of wrong predictions."""
    generator = torch.Generator().manual_seed(labelled)
    tokens = torch.randint(0, 5, (4, 6), generator=generator)
    labels = tokens.masked_fill(torch.arange(6) < 6 - labelled, -100)
    logits = 1000.0 * nn.functional.one_hot(torch.randint(0, 5, (4, 6), generator=generator), 5)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=4, n_head=1, vocab_size=5))
    seen = []
    module = SimpleNamespace(
        add_batch=lambda predictions, references: seen.append(predictions == references),
        compute=lambda: {"wrong": 1 - torch.cat(seen).double().mean().item()},
    )
    prediction = EvalPrediction(predictions=logits.numpy(), label_ids=labels.numpy())
    found = metrics_of_module(module, model, prediction, compute_result=True)
    expected = model.loss_function(logits, labels, vocab_size=5).item() / 1000
    assert found["wrong"] == pytest.approx(expected, rel=1e-6)
    assert 0 < expected < 1


class Writing(MLPForClassification):
    """Changes its batch in place, and counts its rows."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, features, labels=None):
        features.mul_(2.0)
        self.rows += len(features)
        return super().forward(features=features, labels=labels)


def test_an_evaluation_with_the_substitution_says_of_the_model_what_one_without_says(tmp_path):
    found = []
    for compares in (True, False):
        torch.manual_seed(0)
        model = Writing(MLPConfig(num_features=5, hidden_size=8, num_hidden_layers=2, num_labels=CLASSES))
        run = tiny_trainer(tmp_path, model, eval_dataset=SAMPLES, report_substitution=compares)
        found.append((run.evaluate(), model.rows.item()))
    (both, counted), (alone, once) = found
    assert (both["eval_loss"], counted) == (pytest.approx(alone["eval_loss"], abs=1e-7), once)
    assert once == len(SAMPLES)
    twice = substitute_relu(model) and model(**batch(SAMPLES))
    assert both["eval_relu_loss"] == pytest.approx(twice.loss.item(), abs=1e-6)


class Masked(nn.Module):
    """Draws a mask at every forward, in evaluations too, like a masked autoencoder."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(5, 8), LambdaGELU(), nn.Linear(8, 2))

    def forward(self, features, labels=None):
        hidden = self.body(features * torch.rand_like(features).round())
        if isinstance(self.body[1], nn.ReLU) and len(features) == 3:  # the last batch; as a longer text is sampled
            torch.rand(1)
        return {"loss": hidden.square().mean(), "logits": hidden}


class Augmented(Dataset):
    """Samples that each look at has otherwise, by the generators of Python and of NumPy."""

    def __len__(self):
        return len(SAMPLES)

    def __getitem__(self, index):
        return {**SAMPLES[index], "features": SAMPLES[index]["features"] + random.random() + np.random.rand()}


def test_both_loops_draw_the_same_and_as_trainer_does(tmp_path):
    model = Masked()
    anneal_hardness(model, 1.0, target_hardness=1e6)
    found = []
    for plain in (False, True):
        set_seed(7)
        metrics = tiny_trainer(tmp_path, model, plain=plain, eval_dataset=Augmented()).evaluate()
        found.append([metrics["eval_loss"], random.random(), np.random.rand(), torch.rand(1).item()])
        if not plain:
            assert metrics["eval_relu_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-4)
    assert found[0] == found[1]


@dataclass
class GenerationArguments(LambdaGELUTrainingArguments, Seq2SeqTrainingArguments):
    """Both."""


class GenerationTrainer(LambdaGELUTrainer, Seq2SeqTrainer):
    """Both."""


def t5():
    torch.manual_seed(1)
    model = networks.t5(feed_forward_proj="lambda_gelu", num_layers=1, d_model=8, eos_token_id=1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter)
    model.generation_config.max_new_tokens = 6
    generator = torch.Generator().manual_seed(0)
    return model, [{"input_ids": row, "labels": row} for row in torch.randint(2, 30, (9, 5), generator=generator)]


def test_nothing_is_generated_for_a_loss_alone(tmp_path, monkeypatch):
    model, samples = t5()
    monkeypatch.setattr(T5ForConditionalGeneration, "generate", lambda *args, **options: pytest.fail("generated"))
    args = GenerationArguments(output_dir=str(tmp_path), predict_with_generate=True, **ARGUMENTS)
    trainer = GenerationTrainer(model, args, eval_dataset=samples)
    metrics = trainer.evaluate()
    assert metrics["eval_relu_loss"] != metrics["eval_loss"]
    assert args.predict_with_generate
    monkeypatch.undo()
    assert trainer.predict(samples).predictions.shape[0] == len(samples)


def test_generated_tokens_come_in_both_passes(tmp_path):
    (model, samples), seen = t5(), []
    args = GenerationArguments(output_dir=str(tmp_path), predict_with_generate=True, **ARGUMENTS)
    note = lambda prediction: seen.append(torch.from_numpy(prediction.predictions)) or {}  # noqa: E731
    GenerationTrainer(model, args, eval_dataset=samples, compute_metrics=note).evaluate()
    ids = torch.stack([sample["input_ids"] for sample in samples])
    soft, relu = (each.eval().generate(input_ids=ids, max_new_tokens=6) for each in (model, substituted(model)))
    assert not torch.equal(soft, relu)
    for tokens, expected in zip(seen, (soft, relu), strict=True):
        assert torch.equal(tokens[:, : expected.shape[1]], expected)
