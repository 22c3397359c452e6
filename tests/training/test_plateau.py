"""Hardening that begins when λ has settled."""

from itertools import pairwise

import pytest
from closed_forms import hardness
from hardening_runs import TARGET
from tiny_training import assert_same_state, rows, state_of, tiny_model, tiny_trainer, watched

from hf_lgelu import HardeningCallback, initialize_hardness
from hf_lgelu.training.schedules import settled_epoch

# λ moves less and less: the learning rate falls to 0.
RUN = {"train": rows(20), "num_train_epochs": 10, "lr_scheduler_type": "cosine", "learning_rate": 0.005}
STEPS, EPOCHS = 5, 10
LATEST = {"harden": True, "switch_fraction": 0.9, "hardening_switch": "plateau"}


def run(folder, checkpoint=None, seed=0, plain=False, **options):
    model = tiny_model(seed=seed)
    initialize_hardness(model, init_hardness=2.0)
    trainer = tiny_trainer(folder, model, plain=plain, **{**RUN, **options})
    with watched(trainer.model) as seen:
        trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, seen


def means(seen):
    """Mean λ at the first step of each epoch, from s."""
    firsts = seen.trained_raw[::STEPS]
    return [sum(float(hardness(raw, 0.1)) for raw in values) / len(values) for values in firsts]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The drift of each epoch of a run that learns λ for nine of ten epochs."""
    _, seen = run(tmp_path_factory.mktemp("learned"), **{**LATEST, "plateau_tolerance": 0.0})
    path = means(seen)
    drift = [abs(after - before) / before for before, after in pairwise(path)]
    assert drift[8] > 0
    return drift


def switch_of(seen):
    """Epochs in which λ followed s."""
    follows = [
        values == pytest.approx([float(hardness(raw, 0.1)) for raw in raws], rel=1e-6)
        for values, raws in zip(seen.trained, seen.trained_raw, strict=True)
    ]
    assert follows == sorted(follows, reverse=True)
    return sum(follows) / STEPS


@pytest.mark.parametrize(
    ("path", "tolerance", "settled"),
    [
        ([1.0], 0.1, None),
        ([1.0, 1.0], 0.1, None),
        ([1.0, 1.05, 1.1], 0.1, 2),
        ([1.0, 1.05, 2.0, 2.1, 2.2], 0.1, 4),
        ([2.0, 1.0, 1.0, 2.0, 2.0], 0.1, None),
        ([1.0, 1.125, 1.265625], 0.125, 2),
    ],
)
def test_it_has_settled_after_two_calm_epochs_running(path, tolerance, settled):
    assert settled_epoch(path, tolerance) == settled


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
def test_hardening_begins_after_the_second_calm_epoch_and_ends_at_the_target(tmp_path, learned, strategy):
    tolerance = max(learned[4:6]) * 1.001  # of the fifth and sixth epoch
    expected = next(e for e in range(2, 10) if learned[e - 2] <= tolerance and learned[e - 1] <= tolerance)
    assert 2 < expected < 9
    _, seen = run(tmp_path, **LATEST, plateau_tolerance=tolerance, hardening_strategy=strategy)
    assert switch_of(seen) == expected
    start = [float(hardness(raw, 0.1)) for raw in seen.trained_raw[-1]]
    # Algorithm 1 from there on, in epochs or in steps.
    total, switch = (EPOCHS, expected) if strategy == "epoch" else (EPOCHS * STEPS, expected * STEPS)
    for index in range(expected * STEPS, EPOCHS * STEPS):
        position = index // STEPS + 1 if strategy == "epoch" else index + 1
        share = (position - switch) / (total - switch)
        assert seen.trained[index] == pytest.approx([s + share * (TARGET - s) for s in start], rel=1e-6)
    assert seen.trained[-1] == pytest.approx([TARGET] * 2, rel=1e-7)


def test_what_never_settles_hardens_at_the_latest(tmp_path):
    _, seen = run(tmp_path, **{**LATEST, "switch_fraction": 0.5}, plateau_tolerance=0.0)
    assert switch_of(seen) == 5


def test_it_works_in_trainer_too(tmp_path):
    callback = HardeningCallback(switch="plateau", switch_fraction=0.9, plateau_tolerance=1e9)
    _, seen = run(tmp_path, plain=True, callbacks=[callback])
    assert switch_of(seen) == 2


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
def test_a_resumed_run_decides_as_the_uninterrupted_one_did(tmp_path, learned, strategy):
    options = {**LATEST, "plateau_tolerance": max(learned[4:6]) * 1.001, "hardening_strategy": strategy}
    whole, seen = run(tmp_path, save_strategy="steps", save_steps=4, **options)
    for step in (20, 24, 32):  # between the calm epochs, where hardening begins, and in its middle
        folder = str(tmp_path / f"checkpoint-{step}")
        resumed, tail = run(tmp_path / "resumed", checkpoint=folder, seed=99, **options)
        assert tail.trained == seen.trained[step:]
        assert_same_state(state_of(resumed.model), state_of(whole.model))


def test_a_run_that_hardens_only_after_it_was_resumed_counts_its_epochs(tmp_path):
    """What it notes begins with the sixth of ten epochs, and the first calm ones are that and the seventh."""
    run(tmp_path, save_strategy="epoch")
    folder = str(tmp_path / f"checkpoint-{5 * STEPS}")
    _, seen = run(tmp_path / "resumed", checkpoint=folder, **LATEST, plateau_tolerance=1e9)
    assert 5 + switch_of(seen) == 7
    start = [float(hardness(raw, 0.1)) for raw in seen.trained_raw[-1]]
    for epoch in (8, 9, 10):
        expected = [s + (epoch - 7) / 3 * (TARGET - s) for s in start]
        assert seen.trained[(epoch - 6) * STEPS] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"switch": "later"}, "unknown switch 'later' of hardening; accepted: fixed, plateau"),
        ({"plateau_tolerance": 0.5}, "plateau_tolerance counts with switch='plateau' alone"),
        ({"plateau_tolerance": -0.1}, "plateau_tolerance must be a finite number >= 0, got -0.1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HardeningCallback(**options)
