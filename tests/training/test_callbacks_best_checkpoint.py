"""Which checkpoint is the best one, when a soft epoch has the better metric and cannot be substituted."""

import pytest
from closed_forms import target
from tiny_training import assert_same_state, hardness_values, rows, state_of, tiny_model, tiny_trainer
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_lgelu import HardeningCallback

TARGET = float(target())
# T = 8, so e_s = 2 and λ(e) = λ(2) + (e − 2)/6·(159.577 − λ(2)): from epoch 5 on at least half the target.
RUN = {
    "num_train_epochs": 8,
    "eval_strategy": "epoch",
    "eval_dataset": rows(6, seed=1),
    "metric_for_best_model": "score",
}


class Epochs(TrainerCallback):
    """The weights at each evaluation."""

    def __init__(self):
        self.states = []

    def on_evaluate(self, args, state, control, model, **kwargs):
        self.states.append(state_of(model))


def train(folder, rising=False, callbacks=(), activation="lambda_gelu", resume=None, **options):
    """A metric that falls with every epoch, so that the first, the softest, has the best; or one that rises."""
    model, epochs = tiny_model(activation), Epochs()
    quicker = {} if options.get("plain") else {"report_substitution": False}
    trainer = tiny_trainer(
        folder,
        model,
        compute_metrics=lambda prediction: {"score": trainer.state.epoch if rising else -trainer.state.epoch},
        callbacks=[epochs, *callbacks],
        **{**RUN, **quicker, **options},
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, epochs.states


def step_of(trainer):
    return int(trainer.state.best_model_checkpoint.rpartition("-")[2])


@pytest.mark.parametrize(("rising", "best"), [(False, 5), (True, 8)])
def test_with_hardening_the_best_hardened_epoch_wins(tmp_path, rising, best):
    trainer, states = train(tmp_path, rising, save_strategy="epoch", load_best_model_at_end=True, harden=True)
    assert (step_of(trainer), abs(trainer.state.best_metric)) == (best * 3, best)
    assert_same_state(state_of(trainer.model), states[best - 1])
    assert min(hardness_values(trainer.model)) >= TARGET / 2


def test_the_best_of_a_run_that_did_not_harden_counts_no_longer(tmp_path):
    options = {"save_strategy": "epoch", "load_best_model_at_end": True}
    train(tmp_path, **(options | {"num_train_epochs": 2}))
    resumed, states = train(tmp_path, **options, harden=True, resume=True)
    assert min(hardness_values(resumed.model)) > 0.5 * TARGET
    assert step_of(resumed) == 15  # the metric falls, and from epoch 5 on the gates are hard
    assert_same_state(state_of(resumed.model), states[2])


def test_another_target_moves_the_first_epoch_that_counts(tmp_path):
    """Half of what the callback hardens to, not half of the default."""
    options = {"save_strategy": "epoch", "load_best_model_at_end": True, "harden": True}
    trainer, _ = train(tmp_path, target_hardness=3.0, switch_fraction=0.5, **options)
    # λ is near 1.05 before the switch; λ(5) = 1.05 + 1/4·1.95 ≥ 1.5.
    assert step_of(trainer) == 5 * 3


def test_checkpoints_are_kept_by_the_same_rule(tmp_path):
    train(tmp_path, save_strategy="best", harden=True)
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-15"]


def test_a_run_that_never_hardens_enough_keeps_its_last_weights(tmp_path):
    """Evaluated in soft epochs only: no best checkpoint, and nothing soft is restored."""
    soft = {"load_best_model_at_end": True, "save_strategy": "epoch", "harden": True}
    trainer, states = train(tmp_path / "stopped", **soft, callbacks=[StopAt(3)])
    assert trainer.state.best_model_checkpoint is None
    assert trainer.state.epoch == 3
    assert min(hardness_values(trainer.model)) == pytest.approx(TARGET / 6, rel=0.1)
    assert states


def test_early_stopping_waits_until_an_epoch_can_be_the_best(tmp_path):
    """Patience 2 with a falling metric: after epoch 7, two after the first hardened one; not after epoch 3."""
    stop = EarlyStoppingCallback(early_stopping_patience=2)
    trainer, states = train(tmp_path, save_strategy="epoch", load_best_model_at_end=True, harden=True, callbacks=[stop])
    assert len(states) == 7
    assert step_of(trainer) == 15


class StopAt(TrainerCallback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.epoch >= self.epoch
        return control


def test_resuming_remembers_the_best_hardened_checkpoint(tmp_path):
    options = {"save_strategy": "epoch", "load_best_model_at_end": True, "harden": True}
    trainer, _ = train(tmp_path, **options)
    best = state_of(trainer.model)
    resumed = tiny_trainer(
        tmp_path,
        tiny_model(seed=9),
        compute_metrics=lambda prediction: {"score": -resumed.state.epoch},
        **RUN,
        **options,
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-18"))
    assert step_of(resumed) == 15
    assert_same_state(state_of(resumed.model), best)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"load_best_model_at_end": True, "save_strategy": "epoch"}, "load_best_model_at_end"),
        ({"save_strategy": "best"}, "save_strategy='best'"),
    ],
)
def test_a_plain_trainer_is_refused(tmp_path, options, named):
    trainer = tiny_trainer(tmp_path, plain=True, callbacks=[HardeningCallback()], **RUN, **options)
    with pytest.raises(ValueError, match=f"{named} .*LambdaGELUTrainer"):
        trainer.train()
