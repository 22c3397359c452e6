"""The hardness group through LambdaGELUTrainer: every optimizer that needs no other package."""

import pytest
import torch
from tiny_training import ARGUMENTS, raw_values, rows, tiny_model, tiny_trainer

from hf_lgelu import LambdaGELUTrainer, LambdaGELUTrainingArguments, hardness_parameter_groups

IN_TORCH = ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"]


@pytest.mark.parametrize("name", IN_TORCH)
def test_hardness_has_nine_times_the_rate_and_no_decay(tmp_path, name):
    model = tiny_model()
    trainer = tiny_trainer(tmp_path, model, learning_rate=1e-3, weight_decay=0.25, optim=name)
    groups = trainer.create_optimizer().param_groups
    of_group = {id(parameter): group for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(of_group) == len(list(model.parameters()))
    for parameter_name, parameter in model.named_parameters():
        group = of_group[id(parameter)]
        hardness = parameter_name.endswith("raw_hardness")
        assert float(group["lr"]) == pytest.approx(9e-3 if hardness else 1e-3, rel=1e-6)
        if hardness or "bias" in parameter_name or "norm" in parameter_name:
            assert group["weight_decay"] == 0
        else:
            assert group["weight_decay"] == 0.25


@pytest.mark.parametrize("multiplier", [1.0, 0.0, 2.5])
def test_multiplier_is_an_option(tmp_path, multiplier):
    model = tiny_model()
    before = raw_values(model)
    trainer = tiny_trainer(tmp_path, model, hardness_lr_multiplier=multiplier, learning_rate=0.5, optim="sgd")
    assert trainer.create_optimizer().param_groups[-1]["lr"] == 0.5 * multiplier
    trainer.train()
    assert (raw_values(model) == before) == (multiplier == 0)


# Optimizers that are passed in


def test_a_passed_optimizer_with_a_hardness_group_is_used_as_it_is(tmp_path, caplog):
    model = tiny_model()
    optimizer = torch.optim.AdamW(hardness_parameter_groups(model, 0.02, 4.0, weight_decay=0.1))
    trainer = tiny_trainer(tmp_path, model, optimizers=(optimizer, None), logging_strategy="steps", logging_steps=1)
    trainer.train()
    assert len(optimizer.param_groups) == 3
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert (first["learning_rate"], first["hardness_learning_rate"]) == (0.02, 0.08)
    assert "no hardness group" not in caplog.text


class Own(LambdaGELUTrainer):
    """With an optimizer of its own, as Trainer's docstring recommends for other rates."""

    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        return self.optimizer


@pytest.mark.parametrize("harden", [False, True])
def test_a_subclass_whose_optimizer_has_no_hardness_group_is_told(tmp_path, caplog, harden):
    args = LambdaGELUTrainingArguments(
        output_dir=str(tmp_path), **ARGUMENTS | {"harden": harden, "num_train_epochs": 4, "log_hardness": False}
    )
    Own(tiny_model(), args, train_dataset=rows(12)).train()
    assert caplog.text.count("has no hardness group: the raw hardness learns and decays as the weights") == 1
