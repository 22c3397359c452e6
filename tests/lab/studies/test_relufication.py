"""Relufication against the same two phases done by hand."""

import copy

import pytest
import torch
from lgelu_lab.benchmarks.data import FeatureRows, collate_rows
from lgelu_lab.studies.relufication import RelufyCallback
from torch import nn
from torch.nn import functional as F

from hf_lgelu import LambdaGELUTrainer, LambdaGELUTrainingArguments, MLPConfig, MLPForClassification


def small(activation="gelu"):
    torch.manual_seed(0)
    return MLPForClassification(
        MLPConfig(num_features=3, hidden_size=8, num_hidden_layers=2, num_labels=2, hidden_act=activation)
    )


def trained(model, folder, resume_from_checkpoint=None, switch_fraction=0.25, strategy="epoch", **options):
    torch.manual_seed(1)
    rows = FeatureRows(torch.randn(8, 3), torch.randint(0, 2, (8,)))
    arguments = LambdaGELUTrainingArguments(
        str(folder), **{"num_train_epochs": 8, "save_strategy": "no",
                        "per_device_train_batch_size": 8, **options},
        optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0.0, eval_strategy="epoch",
        use_cpu=True, report_to="none", disable_tqdm=True, log_level="error", remove_unused_columns=False,
        require_lambda_gelu=False,
    )  # fmt: skip
    trainer = LambdaGELUTrainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate_rows,
        callbacks=[RelufyCallback(switch_fraction, strategy)],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    return trainer, rows


def forward(model, features, gate):
    for layer in model.layers:
        features = gate(layer.linear(features))
    return model.classifier(features)


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
def test_two_epochs_of_gelu_then_six_of_relu(strategy, tmp_path):
    model = small()
    by_hand = copy.deepcopy(model)
    trainer, rows = trained(model, tmp_path, strategy=strategy)
    for epoch in range(8):  # one batch of all rows an epoch, so that their order does not matter
        gate = F.gelu if epoch < 2 else F.relu  # ⌊0.25·8⌋ = 2
        loss = F.cross_entropy(forward(by_hand, rows.features, gate), rows.labels)
        loss.backward()
        with torch.no_grad():
            for parameter in by_hand.parameters():
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    for name, expected in by_hand.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), expected, rtol=1e-5, atol=1e-6)
    assert [type(layer.activation) for layer in model.layers] == [nn.ReLU, nn.ReLU]
    assert model.config.hidden_act == "relu"
    compared = ["eval_relu_loss" in entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert compared == [True, True] + [False] * 6


def test_a_run_resumed_after_the_switch_equals_the_whole(tmp_path):
    whole, _ = trained(small(), tmp_path, save_strategy="epoch")
    resumed, _ = trained(small(), tmp_path / "again", resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), parameter)
    assert resumed.model.config.hidden_act == "relu"


@pytest.mark.parametrize("activation", ["relu", "lambda_gelu"])
def test_only_a_plain_smooth_gate_is_relufied(activation, tmp_path):
    with pytest.raises(ValueError, match="to relufy"):
        trained(small(activation), tmp_path)
