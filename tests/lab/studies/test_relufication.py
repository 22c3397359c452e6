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


@pytest.mark.parametrize("step", [5, 8])  # behind the last one no epoch is left
def test_a_run_resumed_after_the_switch_equals_the_whole(step, tmp_path):
    whole, _ = trained(small(), tmp_path, save_strategy="epoch")
    resumed, _ = trained(small(), tmp_path / "again", resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), parameter)
    assert resumed.model.config.hidden_act == "relu"


@pytest.mark.parametrize("activation", ["relu", "lambda_gelu"])
def test_only_a_plain_smooth_gate_is_relufied(activation, tmp_path):
    with pytest.raises(ValueError, match="to relufy"):
        trained(small(activation), tmp_path)


def test_no_epoch_before_the_switch_is_the_best(tmp_path):
    # The loss falls from epoch to epoch, and the greatest counts as the best: over the whole run the first epoch.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    options = {"num_train_epochs": 4, "switch_fraction": 0.5, "save_strategy": "epoch", **best}
    trainer, _ = trained(small(), tmp_path, **options)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert max(losses) == losses[0]
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-3")
    assert trainer.state.best_metric == losses[2]
    for step in (2, 3):  # at the switch, and after it
        resumed, _ = trained(small(), tmp_path / f"from-{step}", str(tmp_path / f"checkpoint-{step}"), **options)
        assert resumed.state.best_metric == losses[2]
