"""The substitution report for logits of tokens, models with caches and models with several outputs."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import small_networks as networks
import torch
from plain_evaluation import SAMPLES, by_hand, substituted
from tiny_training import ARGUMENTS, tiny_model, tiny_trainer
from torch import nn
from transformers import (
    BertConfig,
    BertForTokenClassification,
    BertModel,
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import ModelOutput

from hf_lgelu import LambdaGELU, LambdaGELUTrainer, LambdaGELUTrainingArguments, anneal_hardness
from hf_lgelu.training.evaluation import metrics_of_module


def bert_for_tokens():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForTokenClassification(BertConfig(hidden_act="lambda_gelu", vocab_size=11, num_labels=3, **sizes))
    return widened(model)


def widened(model):
    """Weights large enough for a swap to change predictions."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(25)
    return model


def test_of_a_language_model_the_positions_count_that_predict_a_label(tmp_path):
    """As of instruction data: the prompt has no labels, and the answer is predicted one place earlier.

    Among its outputs is a cache.
    """
    torch.manual_seed(0)
    model = widened(networks.gpt2(activation_function="lambda_gelu", n_embd=8, vocab_size=11))
    tokens = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": torch.cat([torch.full((4,), -100), row[4:]])} for row in tokens]
    metrics = tiny_trainer(tmp_path, model, eval_dataset=samples).evaluate()
    relu = substituted(model)
    with torch.no_grad():
        logits, relu_logits = (each.eval()(tokens).logits[:, 3:5] for each in (model, relu))
    change = (logits - relu_logits).abs().max().item()
    assert metrics["eval_relu_max_logit_change"] == pytest.approx(change, rel=1e-5)
    same = (logits.argmax(-1) == relu_logits.argmax(-1)).float().mean().item()
    assert 0 < same < 1
    assert metrics["eval_relu_unchanged_predictions"] == pytest.approx(same)
    for name, each in (("eval_loss", model), ("eval_relu_loss", relu)):
        # Trainer's own loss, however it counts the tokens of a language model.
        own = tiny_trainer(tmp_path, each, plain=True, eval_dataset=samples).evaluate()["eval_loss"]
        assert metrics[name] == pytest.approx(own, rel=1e-5)
    assert metrics["eval_relu_loss"] != pytest.approx(metrics["eval_loss"], rel=1e-3)


class Several(nn.Module):
    """Logits first, then more, in a dict or a tuple."""

    def __init__(self, model, as_tuple):
        super().__init__()
        self.model, self.as_tuple = model, as_tuple

    def forward(self, features, labels=None):
        output = self.model(features, labels)
        outputs = {"loss": output.loss, "logits": output.logits, "hidden": (features, features.sum(-1))}
        return tuple(outputs.values()) if self.as_tuple else ModelOutput(**outputs)


@pytest.mark.parametrize("as_tuple", [False, True])
def test_of_several_outputs_the_first_is_compared(tmp_path, as_tuple):
    model = tiny_model(seed=3)

    def first_accuracy(prediction):
        logits, hidden = prediction.predictions
        assert [array.shape for array in hidden] == [(11, 5), (11,)]
        return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}

    metrics = tiny_trainer(
        tmp_path, Several(model, as_tuple), eval_dataset=SAMPLES, compute_metrics=first_accuracy
    ).evaluate()
    assert metrics["eval_relu_accuracy"] == pytest.approx(by_hand(substituted(model), SAMPLES)[1])
    assert metrics["eval_relu_unchanged_predictions"] < 1


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_without_a_labelled_position_no_share_is_reported(tmp_path):
    samples = [{"input_ids": torch.arange(6), "labels": torch.full((6,), -100)} for _ in range(3)]
    metrics = tiny_trainer(tmp_path, bert_for_tokens(), eval_dataset=samples).evaluate()
    assert metrics["eval_relu_max_logit_change"] == 0
    assert "eval_relu_unchanged_predictions" not in metrics


def test_embeddings_make_no_predictions_and_have_a_cosine(tmp_path):
    """Of the means over the tokens that are no padding, each network run alone on what is no padding."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = widened(BertModel(BertConfig(hidden_act="lambda_gelu", vocab_size=11, **sizes)))
    lengths = (6, 4, 6, 3, 5)
    samples = [
        {"input_ids": torch.randint(0, 11, (6,)), "attention_mask": (torch.arange(6) < length).long()}
        for length in lengths
    ]
    metrics = tiny_trainer(tmp_path, model, eval_dataset=samples).evaluate()
    with torch.no_grad():
        means = [
            [
                each.eval()(sample["input_ids"][None, :length]).last_hidden_state[0].mean(0)
                for sample, length in zip(samples, lengths, strict=True)
            ]
            for each in (model, substituted(model))
        ]
    cosines = [torch.cosine_similarity(*pair, dim=0).item() for pair in zip(*means, strict=True)]
    assert metrics["eval_relu_cosine"] == pytest.approx(sum(cosines) / 5, rel=1e-5)
    assert max(cosines) < 0.999
    assert "eval_relu_unchanged_predictions" not in metrics


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


class Plain(nn.Module):
    """A network in plain torch; `give` makes its output of the two hidden units and the labels."""

    def __init__(self, give):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(5, 8), LambdaGELU(), nn.Linear(8, 2))
        self.give = give

    def forward(self, features, labels=None):
        return self.give(self.body(features), labels)


def regression(hidden, labels):
    values = hidden[:, 0]
    return {"loss": (values - labels.float()).square().mean(), "values": values}


def loss_alone(hidden, labels):
    return {"loss": (hidden[:, 0] - labels.float()).square().mean()}


@pytest.mark.parametrize("give", [regression, loss_alone])
def test_models_without_logits_are_evaluated_as_trainer_does(tmp_path, give):
    def error(prediction):
        return {"error": float(abs(prediction.predictions - prediction.label_ids).mean())}

    model = Plain(give)
    options = {"eval_dataset": SAMPLES} | ({"compute_metrics": error} if give is regression else {})
    own = tiny_trainer(tmp_path, model, plain=True, **options).evaluate()
    relu = tiny_trainer(tmp_path, substituted(model), plain=True, **options).evaluate()
    metrics = tiny_trainer(tmp_path, model, **options).evaluate()
    if give is regression:
        assert metrics["eval_error"] == pytest.approx(own["eval_error"])
        assert metrics["eval_relu_error"] == pytest.approx(relu["eval_error"])
    assert metrics["eval_loss"] == pytest.approx(own["eval_loss"], rel=1e-6)
    assert metrics["eval_relu_loss"] == pytest.approx(relu["eval_loss"], rel=1e-6)
    assert metrics["eval_loss"] != pytest.approx(metrics["eval_relu_loss"], rel=1e-3)
    assert ("eval_relu_max_logit_change" in metrics) is (give is regression)
    assert "eval_relu_unchanged_predictions" not in metrics


class Masked(nn.Module):
    """Draws a mask at every forward, in evaluations too, like a masked autoencoder."""

    def __init__(self):
        super().__init__()
        self.body = Plain(regression).body

    def forward(self, features, labels=None):
        hidden = self.body(features * torch.rand_like(features).round())
        return {"loss": hidden.square().mean(), "logits": hidden}


def test_both_passes_draw_the_same_and_as_trainer_does(tmp_path):
    model = Masked()
    anneal_hardness(model, 1.0, target_hardness=1e6)
    torch.manual_seed(7)
    metrics = tiny_trainer(tmp_path, model, eval_dataset=SAMPLES).evaluate()
    drawn = torch.rand(1)
    torch.manual_seed(7)
    own = tiny_trainer(tmp_path, model, plain=True, eval_dataset=SAMPLES).evaluate()
    assert torch.rand(1) == drawn
    assert metrics["eval_relu_max_logit_change"] < 1e-5
    assert metrics["eval_loss"] == pytest.approx(own["eval_loss"], rel=1e-6)


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
    model, samples = t5()
    seen = []

    def note(prediction):
        seen.append(prediction.predictions)
        return {}

    args = GenerationArguments(output_dir=str(tmp_path), predict_with_generate=True, **ARGUMENTS)
    trainer = GenerationTrainer(model, args, eval_dataset=samples, compute_metrics=note)
    metrics = trainer.evaluate()
    soft, relu = (
        each.eval().generate(input_ids=torch.stack([sample["input_ids"] for sample in samples]), max_new_tokens=6)
        for each in (model, substituted(model))
    )
    for array, expected in zip(seen, (soft, relu), strict=True):
        assert (array[:, : expected.shape[1]] == expected.numpy()).all()
    unchanged = (soft == relu).all(dim=1).float().mean().item()
    assert metrics["eval_relu_unchanged_predictions"] == pytest.approx(unchanged)
    assert 0 < unchanged < 1
    assert "eval_relu_max_logit_change" not in metrics
