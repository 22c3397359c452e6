"""HardeningCallback in real runs: λ of every forward pass against Algorithm 1 by hand."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from closed_forms import hardness
from hardening_runs import TARGET, check_path, epochs, run
from tiny_training import hardness_values, raw_values, rows, tiny_model, tiny_trainer

from hf_lgelu import HardeningCallback, HardeningConfig, hardness_parameter_groups, replace_activations


@pytest.mark.parametrize(("total", "plain"), [(4, True), (5, False), (8, True), (10, False)])
def test_algorithm_1(tmp_path, total, plain):
    """12 samples in batches of 4: 3 steps an epoch; the evaluation after epoch e sees λ(e) as well."""
    trainer, seen = run(
        tmp_path, plain=plain, num_train_epochs=total, eval_strategy="epoch", eval_dataset=rows(4, seed=1)
    )
    check_path(trainer.model, seen, epochs(total, 3), total)
    assert len(seen.evaluated) == total
    switch = {4: 1, 5: 1, 8: 2, 10: 2}[total]
    for epoch in range(switch + 1, total + 1):
        assert seen.evaluated[epoch - 1] == seen.trained[3 * epoch - 1]
    assert seen.trained[3 * switch][0] > 20 > seen.trained[3 * switch - 1][0]  # epoch e_s + 1 is the first hardened
    assert hardness_values(trainer.model) == [torch.tensor(TARGET).item()] * 2


@pytest.mark.parametrize("total", [1, 3])
def test_without_an_epoch_to_learn_in_hardening_begins_at_once_and_says_so(tmp_path, caplog, total):
    before = [float(hardness(raw, 0.1)) for raw in raw_values(tiny_model())]
    trainer, seen = run(tmp_path, num_train_epochs=total)
    check_path(trainer.model, seen, epochs(total, 3), total, switch=0)
    assert [float(hardness(raw, 0.1)) for raw in raw_values(trainer.model)] == before
    assert caplog.text.count("hardening begins at once and λ is never learned") == 1
    caplog.clear()
    run(tmp_path, num_train_epochs=total, switch_fraction=0.0)  # asked for
    assert not caplog.records


def test_callback_takes_the_same_options(tmp_path):
    hardening = HardeningConfig(50.0, None, 0.4, "geometric", "steps")
    trainer, seen = run(tmp_path, plain=True, hardening=hardening, num_train_epochs=5)
    check_path(trainer.model, seen, list(range(1, 16)), 15, switch=6, end=50.0, schedule="geometric")


# What is refused


def test_a_target_for_what_is_no_gate_is_refused_before_the_first_step(tmp_path):
    targets, told = {"activations": 9.0}, r"activations, .*activations\.0, activations\.1"
    callback = HardeningCallback(HardeningConfig(target_hardness=targets))
    trainer = tiny_trainer(tmp_path, plain=True, num_train_epochs=8, callbacks=[callback])
    with pytest.raises(ValueError, match=told):
        trainer.train()
    assert trainer.state.global_step == 0


def test_an_s_that_somebody_froze_is_not_hardened_without_a_word(tmp_path):
    model = tiny_model()
    model.activations[1].raw_hardness.requires_grad_(False)
    with pytest.raises(ValueError, match=r"activations\.1 .*requires_grad_\(True\)"):
        run(tmp_path, model=model)


@pytest.mark.parametrize("plain", [False, True])
def test_an_optimizer_from_before_the_surgery_is_refused(tmp_path, plain):
    model = tiny_model("gelu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_activations(model)
    with pytest.raises(RuntimeError, match=r"raw hardness .*after the surgery"):
        run(tmp_path, model=model, plain=plain, optimizers=(optimizer, None))


def test_progress_is_the_position_of_the_trainer():
    """Stateless: epoch fractions, as after a resume in the middle of an epoch, count as the epoch they are in."""
    by_epoch, by_step = HardeningCallback(), HardeningCallback(HardeningConfig(hardening_strategy="steps"))

    def at(epoch, step=0, total_epochs=8, total_steps=80):
        return SimpleNamespace(epoch=epoch, global_step=step, num_train_epochs=total_epochs, max_steps=total_steps)

    for epoch, expected in ((None, None), (0, None), (1.99, None), (2.0, 1 / 6), (2.6, 1 / 6), (7.0, 1), (8.0, 1)):
        assert by_epoch.progress(at(epoch)) == expected
    for step, expected in ((0, None), (19, None), (20, 1 / 60), (78, 59 / 60), (79, 1), (80, 1)):
        assert by_step.progress(at(0.5, step)) == expected
    assert by_epoch.progress(at(1.0, total_epochs=2**40)) is None


@pytest.mark.parametrize("grouped", [True, False])
def test_a_plain_trainer_without_a_group_for_s_is_told(tmp_path, caplog, grouped):
    model = tiny_model()
    optimizers = (
        (torch.optim.AdamW(hardness_parameter_groups(model, learning_rate=0.02)), None) if grouped else (None, None)
    )
    run(tmp_path, plain=True, model=model, optimizers=optimizers, num_train_epochs=4)
    assert ("The optimizer has no hardness group" in caplog.text) is not grouped


def test_callbacks_do_not_keep_a_model_alive(tmp_path):
    callback, model = HardeningCallback(HardeningConfig(switch_fraction=0.0)), tiny_model()
    trainer = tiny_trainer(tmp_path, model, plain=True, callbacks=[callback], train=rows(4))
    trainer.train()
    alive = weakref.ref(model)
    del trainer, model
    gc.collect()
    assert alive() is None
