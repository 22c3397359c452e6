"""The MLP model, against loops over Python floats."""

import math

import numpy as np
import pytest
import torch
from family import rewrite_tensors
from lgelu_lab.benchmarks.data import FeatureRows, collate_rows
from transformers import AutoModel, Trainer, TrainingArguments

from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.registry import register_activation


def small_mlp(hidden_act="gelu", **changes):
    register_activation()
    torch.manual_seed(0)
    sizes = {"num_features": 5, "hidden_size": 7, "num_hidden_layers": 3, "num_labels": 4} | changes
    return MLPForClassification(MLPConfig(hidden_act=hidden_act, **sizes))


def small_batch(rows=6):
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(rows, 5, generator=generator) * 3
    return {"features": features, "labels": torch.randint(0, 4, (rows,), generator=generator)}


def gate(hardness):
    return lambda x: x * 0.5 * math.erfc(-hardness * x / math.sqrt(2))


ACTIVATIONS = {"relu": lambda x: max(x, 0.0), "gelu": gate(1.0), "lambda_gelu": gate(1.05)}


def affine(values, linear):
    weight, bias = linear.weight.tolist(), linear.bias.tolist()
    return [sum(w * v for w, v in zip(row, values, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


def loop_logits(model, features, activation):
    """Logits of each row, in float64 one number at a time."""
    logits = []
    for values in features.tolist():
        for layer in model.layers:
            values = [activation(value) for value in affine(values, layer.linear)]
        logits.append(affine(values, model.classifier))
    return logits


def loop_loss(logits, labels):
    losses = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        losses.append(math.log(sum(math.exp(value) for value in row)) - row[label])
    return sum(losses) / len(losses)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_logits_and_loss_equal_a_loop_over_floats(name):
    model, batch = small_mlp(name), small_batch()
    with torch.no_grad():
        for parameter in model.parameters():  # larger weights, so that the gates are used over their whole range
            parameter.mul_(3 if parameter.numel() > 1 else 1)
        output = model(**batch)
    expected = loop_logits(model, batch["features"], ACTIVATIONS[name])
    np.testing.assert_allclose(output.logits, expected, rtol=2e-5, atol=2e-5)
    assert output.loss.item() == pytest.approx(loop_loss(expected, batch["labels"]), rel=1e-5)
    assert model(batch["features"]).loss is None


def test_defaults_are_the_papers_network():
    config = MLPConfig(num_features=784, num_labels=10)
    assert (config.hidden_size, config.num_hidden_layers, config.hidden_act) == (256, 4, "lambda_gelu")


def test_weights_start_like_torchs_own_linear_layers():
    model = small_mlp(num_features=300, hidden_size=200, num_labels=50)
    for linear in (module for module in model.modules() if isinstance(module, torch.nn.Linear)):
        bound = 1 / math.sqrt(linear.in_features)
        for tensor, tolerance in ((linear.weight, 0.02), (linear.bias, 0.2)):
            assert 0.9 * bound < tensor.abs().max() <= bound
            assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=tolerance)


def test_a_load_fills_missing_tensors_and_leaves_the_others(tmp_path):
    model = small_mlp()
    torch.nn.init.constant_(model.layers[0].linear.weight, 0.5)  # a value that initialization cannot draw
    model.save_pretrained(tmp_path)
    rewrite_tensors(tmp_path, lambda tensors: tensors.pop("layers.0.linear.bias"))
    linear = MLPForClassification.from_pretrained(tmp_path).layers[0].linear
    assert (linear.weight == 0.5).all()
    assert 0 < linear.bias.abs().max() <= 1 / math.sqrt(5)


def test_bfloat16_weights_take_float32_features_and_give_a_float32_loss(tmp_path):
    model, batch = small_mlp().to(torch.bfloat16), small_batch()
    output = model(**batch)
    output.loss.backward()
    assert (output.logits.dtype, output.loss.dtype) == (torch.bfloat16, torch.float32)
    assert model.layers[0].linear.weight.grad.abs().sum() > 0
    assert output.loss.item() == pytest.approx(small_mlp()(**batch).loss.item(), rel=2e-2)
    model.save_pretrained(tmp_path)
    reloaded = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(reloaded(batch["features"]).logits, output.logits)


def test_accumulation_does_not_scale_the_gradient(tmp_path):
    accumulation = 4
    model, batch = small_mlp(), small_batch(rows=16)
    expected = {name: tensor.clone() for name, tensor in model.named_parameters()}
    loss = model(**batch).loss
    for (name, tensor), gradient in zip(
        expected.items(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        expected[name] = (tensor - 0.5 * gradient).detach()
    options = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    options |= {"per_device_train_batch_size": 16 // accumulation, "gradient_accumulation_steps": accumulation}
    options |= {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    arguments = TrainingArguments(tmp_path, max_steps=1, remove_unused_columns=False, **options)
    trainer = Trainer(model=model, args=arguments, train_dataset=FeatureRows(**batch), data_collator=collate_rows)
    trainer.train()
    assert trainer.state.global_step == 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({}, TypeError, "num_features"),
        ({"num_features": 5, "num_labels": 1}, ValueError, "num_labels.* 2"),
        ({"num_features": 5, "id2label": {0: "only"}}, ValueError, "num_labels.* 2"),
    ],
)
def test_a_wrong_config_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        MLPConfig(**changes)


@pytest.mark.parametrize("shape", [(2, 4), (2, 5, 1), (5,)])
def test_features_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"\(batch, 5\).*flatten"):
        small_mlp()(torch.zeros(shape))
