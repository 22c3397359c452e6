"""What changes in a model in the middle of its training does not escape the callbacks."""

import gc
import weakref

import pytest
from tiny_training import hardness_values, rows, tiny_model, tiny_trainer
from transformers import TrainerCallback

from hf_lgelu import HardeningCallback, HardeningConfig, LambdaGELU, replace_activations


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
def test_what_is_put_elsewhere_by_hand_is_hardened_and_logged(tmp_path, strategy):
    model = tiny_model("gelu")
    replace_activations(model, include=lambda name: name == "activations.0", rewrite_config=False)

    class Adds(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            if state.epoch == 2:
                model.activations[1] = LambdaGELU()

    options = {"harden": True, "hardening_strategy": strategy, "switch_fraction": 0.0, "num_train_epochs": 4}
    trainer = tiny_trainer(tmp_path, model, **options, logging_strategy="steps", logging_steps=1, callbacks=[Adds()])
    trainer.train()
    assert hardness_values(model) == pytest.approx([159.577] * 2, rel=1e-5)
    logged = ["hardness/activations.1" in entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [False] * 6 + [True] * 6


def test_callbacks_do_not_keep_a_model_alive(tmp_path):
    callback, model = HardeningCallback(HardeningConfig(switch_fraction=0.0)), tiny_model()
    trainer = tiny_trainer(tmp_path, model, callbacks=[callback], train=rows(4))
    trainer.train()
    alive = weakref.ref(model)
    del trainer, model
    gc.collect()
    assert alive() is None
