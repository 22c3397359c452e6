"""λ in the log: read back from tensorboard's event files and the trainer's history."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_training import hardness_values, lambda_gelus, rows, tiny_model, tiny_trainer
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from hf_lgelu import HardeningCallback, HardnessLogCallback
from hf_lgelu.models.hardening import gates_by_site

NAMES = ["hardness/activations.0", "hardness/activations.1", "hardness/mean", "hardness_learning_rate"]
# 12 steps, a log after each; e_s = 1, so that λ learns in the first 3 and hardens after.
RUN = {
    "num_train_epochs": 4,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "learning_rate": 0.01,
    "warmup_steps": 4,
    "eval_strategy": "epoch",
    "eval_dataset": rows(4, seed=1),
}


class Truth(TrainerCallback):
    """What each step's log should say, read off the model and the optimizer."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, optimizer, **kwargs):
        own = id(lambda_gelus(model)[0].raw_hardness)
        (self.rate,) = [group["lr"] for group in optimizer.param_groups if own in map(id, group["params"])]

    def on_step_end(self, args, state, control, model, **kwargs):
        first, second = hardness_values(model)
        self.steps.append([first, second, (first + second) / 2, self.rate])


def train(folder, truth, plain=False, **options):
    if not plain:
        options |= {"harden": True}
    trainer = tiny_trainer(folder, plain=plain, **{**RUN, "callbacks": [truth], **options})
    if plain:
        trainer.add_callback(HardeningCallback())
        HardnessLogCallback.add_to(trainer)
    trainer.train()
    return trainer


def check(series, steps):
    """`series`: {name: [value at each step]}."""
    assert len(steps) == 12
    for name, expected in zip(NAMES, zip(*steps, strict=True), strict=True):
        assert series[name] == pytest.approx(expected, rel=1e-6), name
    assert series["hardness/mean"][-1] == pytest.approx(159.5769121605731, rel=1e-7)
    assert 1 < series["hardness/mean"][2] < 2 < series["hardness/mean"][3]


def test_a_plain_trainers_log_and_tensorboard_have_the_hardness_but_no_rate_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    truth = Truth()
    trainer = train(tmp_path, truth, plain=True, report_to=["tensorboard"])
    training = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert not any("hardness_learning_rate" in entry for entry in training)
    series = {name: [entry[name] for entry in training] for name in NAMES[:3]}
    check(series | {"hardness_learning_rate": [step[3] for step in truth.steps]}, truth.steps)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    for name, values in series.items():
        assert [event.step for event in events.Scalars(f"train/{name}")] == list(range(1, 13))
        assert [event.value for event in events.Scalars(f"train/{name}")] == pytest.approx(values)


# The history


def test_history_has_the_hardness_of_each_step_and_each_evaluation(tmp_path):
    truth = Truth()
    trainer = train(tmp_path, truth)
    assert not any(name.startswith("hardness") for name in trainer.evaluate())  # which returns the metrics alone
    history = trainer.state.log_history
    training = [entry for entry in history if "loss" in entry]
    check({name: [entry[name] for entry in training] for name in NAMES}, truth.steps)
    assert [entry["hardness_learning_rate"] for entry in training] == pytest.approx(
        [9 * entry["learning_rate"] for entry in training], rel=1e-14
    )
    evaluations = [entry for entry in history if "eval_loss" in entry][:-1]
    assert [[entry[name] for name in NAMES] for entry in evaluations] == [
        pytest.approx(truth.steps[last], rel=1e-6) for last in (2, 5, 8, 11)
    ]
    assert json.dumps(history)


@pytest.mark.parametrize(
    ("activation", "options"), [("lambda_gelu", {"log_hardness": False}), ("gelu", {"require_lambda_gelu": False})]
)
def test_nothing_is_logged_where_it_is_turned_off_and_of_a_baseline(tmp_path, activation, options):
    trainer = tiny_trainer(tmp_path, tiny_model(activation), **options, **RUN)
    trainer.train()
    assert sum("loss" in entry for entry in trainer.state.log_history) == 12
    assert not any(name.startswith("hardness") for entry in trainer.state.log_history for name in entry)


# Its place among the callbacks


def place(trainer):
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds.count(HardnessLogCallback) == 1
    return kinds.index(HardnessLogCallback)


@pytest.mark.parametrize(
    ("given", "log_hardness"),
    [
        (lambda: [], True),
        (lambda: [HardnessLogCallback], True),
        (lambda: [HardnessLogCallback()], True),
        (lambda: [HardnessLogCallback()], False),
    ],
)
def test_it_is_in_front_of_the_reporters_however_it_came(tmp_path, given, log_hardness):
    callbacks = [TrainerCallback(), *given()]
    trainer = tiny_trainer(tmp_path, report_to=["tensorboard"], callbacks=callbacks, log_hardness=log_hardness)
    trainer.add_callback(TensorBoardCallback)
    assert place(trainer) == 0


def test_passed_to_a_plain_trainer_it_refuses_to_run_too_late(tmp_path):
    trainer = tiny_trainer(tmp_path, plain=True, callbacks=[HardnessLogCallback()])
    with pytest.raises(RuntimeError, match=r"HardnessLogCallback.add_to\(trainer\)"):
        trainer.train()


@pytest.mark.parametrize("plain", [False, True])
def test_learned_hardness_survives_a_run_that_logs_nothing(tmp_path, plain):
    learned = []

    class AtSwitch(TrainerCallback):
        def on_epoch_end(self, args, state, control, model, **kwargs):
            learned.append(hardness_values(model))

    model = tiny_model()
    options = {"callbacks": [AtSwitch(), HardeningCallback()]} if plain else {"callbacks": [AtSwitch()], "harden": True}
    quiet = {"num_train_epochs": 4, "logging_strategy": "no", "save_strategy": "epoch", "learning_rate": 0.01}
    tiny_trainer(tmp_path, model, plain=plain, **quiet, **options).train()
    for saved in tmp_path.glob("checkpoint-*"):
        rows = json.loads((saved / "trainer_state.json").read_text())["log_history"]
        rows = [[row[name] for name in NAMES[:2]] for row in rows if "hardness/mean" in row]
        assert rows == [pytest.approx(each, rel=1e-6) for each in learned[: len(rows)]]
    assert len(list(tmp_path.glob("checkpoint-*"))) == len(learned) == 4
    found = [gate.learned for gate in gates_by_site(model).values()]
    assert found == pytest.approx(learned[0], rel=1e-6)  # e_s = 1
    assert learned[0] != pytest.approx(learned[-1])
