"""LambdaGELUTrainer: the module tree around an evaluation, predictions, arguments, refusals."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from tiny_training import ARGUMENTS, assert_same_state, batch, hardness_values, rows, state_of, tiny_model, tiny_trainer
from transformers.trainer_utils import HPSearchBackend

from hf_lgelu import LambdaGELUTrainer, LambdaGELUTrainingArguments

SAMPLES = rows(6, seed=1)


def tree(model):
    """Every module by name and identity, with its mode."""
    return [(name, id(module), module.training) for name, module in model.named_modules()]


# The module tree


class ForwardError(Exception): ...


@pytest.mark.parametrize("where", ["forward", "compute_metrics", "preprocess_logits_for_metrics"])
def test_an_error_in_the_substituted_pass_leaves_everything_as_it_was(tmp_path, where):
    fails = [True]

    def function(*args):
        if fails and isinstance(model.activations[0], torch.nn.ReLU):
            raise ForwardError
        return {"compute_metrics": {"x": 1.0}, "preprocess_logits_for_metrics": args[0]}.get(where)

    model = tiny_model().eval()
    before, functions = state_of(model), {"compute_metrics": lambda prediction: {}, where: function}
    model.register_forward_pre_hook(functions.pop("forward", lambda *args: None))
    trainer = tiny_trainer(tmp_path, model, eval_dataset=SAMPLES, **functions)
    modules, callbacks = tree(model), [*trainer.callback_handler.callbacks]
    with pytest.raises(ForwardError):
        trainer.evaluate()
    assert tree(model) == modules
    assert_same_state(state_of(model), before)
    assert trainer.callback_handler.callbacks == callbacks
    fails.clear()
    assert_works(trainer)


def assert_works(trainer):
    """Ordinary afterwards: a prediction as Trainer's, and a complete report."""
    loss, logits, labels = trainer.prediction_step(trainer.model, batch(SAMPLES), False)
    assert (loss.dim(), logits.shape, labels.shape) == (0, (6, 3), (6,))
    assert {"eval_relu_live_units", "eval_relu_loss"} <= trainer.evaluate().keys()


# Predictions


def test_predict_returns_ordinary_predictions(tmp_path):
    model = tiny_model()

    def shape(prediction):
        assert prediction.predictions.shape == (6, 3)
        return {"size": 6.0}

    output = tiny_trainer(tmp_path, model, compute_metrics=shape).predict(SAMPLES)
    with torch.no_grad():
        logits = model(batch(SAMPLES)["features"]).logits.numpy()
    assert output.predictions == pytest.approx(logits, rel=1e-5)
    assert output.label_ids.tolist() == batch(SAMPLES)["labels"].tolist()
    assert output.metrics["test_size"] == output.metrics["test_relu_size"] == 6
    assert output.metrics["test_relu_loss"] > 0


def test_training_is_that_of_a_plain_trainer_with_the_same_groups(tmp_path):
    """c = 1 and no decay: nothing but reports is added."""
    options = {"num_train_epochs": 2, "eval_strategy": "epoch", "eval_dataset": SAMPLES, "hardness_lr_multiplier": 1.0}
    model, plain = tiny_model(dropout=0.2), tiny_model(dropout=0.2)
    tiny_trainer(tmp_path, model, **options).train()
    del options["hardness_lr_multiplier"]
    tiny_trainer(tmp_path, plain, plain=True, **options).train()
    assert_same_state(state_of(model), state_of(plain))


# Arguments


def test_a_search_whose_trials_let_go_of_the_model_goes_on(tmp_path, monkeypatch):
    """As transformers' loops do between trials; model_init makes the next one. Each hardens as its trial says."""
    monkeypatch.setattr(transformers.integrations, "hp_params", lambda trial: trial)
    args = LambdaGELUTrainingArguments(output_dir=str(tmp_path), **ARGUMENTS | {"harden": True, "num_train_epochs": 4})
    trainer = LambdaGELUTrainer(args=args, model_init=lambda: tiny_model(), train_dataset=rows(12))
    trainer.hp_search_backend, trainer.hp_space = HPSearchBackend.OPTUNA, lambda trial: trial.params
    for number, target in enumerate((20.0, 40.0)):
        trainer.train(trial=SimpleNamespace(number=number, params={"target_hardness": target}))
        assert hardness_values(trainer.model) == pytest.approx([target] * 2)
        trainer.model = trainer.model_wrapped = None
    trainer.train()
    assert hardness_values(trainer.model) == pytest.approx([40.0] * 2)
    with pytest.raises(ValueError, match="switch_fraction"):
        trainer.train(trial=SimpleNamespace(number=2, params={"switch_fraction": 1.5}))


def test_no_warnings_in_an_ordinary_run(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_trainer(tmp_path, harden=True, num_train_epochs=4, eval_strategy="epoch", eval_dataset=SAMPLES).train()
