"""HardeningCallback in real runs: λ of every forward pass against Algorithm 1 by hand."""

import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from closed_forms import SCHEDULE_FORMS, hardened, hardness, progress_at, target
from tiny_training import (
    assert_same_state,
    hardness_values,
    lambda_gelus,
    raw_values,
    rows,
    state_of,
    tiny_model,
    tiny_trainer,
    watched,
)
from torch.utils.data import IterableDataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, TrainerCallback

from hf_lgelu import HardeningCallback, release_hardness

TARGET = float(target())


def run(folder, *, plain=False, model=None, hardening=None, **options):
    """Train; return the model and the λ of all forward passes."""
    model = tiny_model() if model is None else model
    if plain:
        options["callbacks"] = [HardeningCallback(**hardening or {})]
    else:
        options["harden"] = True
    trainer = tiny_trainer(folder, model, plain=plain, **options)
    with watched(model) as seen:
        trainer.train()
    return trainer, seen


def check_path(model, seen, position_of, total, *, switch=None, end=TARGET, schedule="linear"):
    """λ of the forward passes that trained, given to which epoch (or step) each belongs.

    s must have learned up to e_s, be bit-exactly constant after it, and λ be the formula of that s.
    """
    switch = total // 4 if switch is None else switch
    assert len(position_of) == len(seen.trained)
    frozen = raw_values(model)
    start = [hardness(raw, module.temperature.item()) for raw, module in zip(frozen, lambda_gelus(model), strict=True)]
    for index, position in enumerate(position_of):
        progress = progress_at(position, total, switch)
        if progress is None:
            by_hand = [float(hardness(raw, 0.1)) for raw in seen.trained_raw[index]]
        else:
            by_hand = [hardened(schedule, float(value), end, progress) for value in start]
            assert seen.trained_raw[index] == frozen
        assert seen.trained[index] == pytest.approx(by_hand, rel=1e-6), (position, index)
        if position == total:
            assert seen.trained[index] == [torch.tensor(end).item()] * len(start)
    soft = [raw for raw, position in zip(seen.trained_raw, position_of, strict=True) if position <= switch]
    if soft:
        assert soft[0] != soft[-1] != frozen  # λ is learned until the last update before the switch
    assert raw_values(model) == frozen


def epochs(total, batches):
    return [epoch for epoch in range(1, total + 1) for _ in range(batches)]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("total", [4, 5, 8, 10])
def test_algorithm_1(tmp_path, total, plain):
    """12 samples in batches of 4: 3 steps an epoch; the evaluation after epoch e sees λ(e) as well."""
    trainer, seen = run(
        tmp_path,
        plain=plain,
        num_train_epochs=total,
        eval_strategy="epoch",
        eval_dataset=rows(4, seed=1),
    )
    check_path(trainer.model, seen, epochs(total, 3), total)
    assert len(seen.evaluated) == total
    switch = {4: 1, 5: 1, 8: 2, 10: 2}[total]
    for epoch in range(switch + 1, total + 1):
        assert seen.evaluated[epoch - 1] == seen.trained[3 * epoch - 1]
    assert seen.trained[3 * switch][0] > 20 > seen.trained[3 * switch - 1][0]  # epoch e_s + 1 is the first hardened
    assert hardness_values(trainer.model) == [torch.tensor(TARGET).item()] * 2


@pytest.mark.parametrize("total", [1, 2, 3])
def test_without_an_epoch_to_learn_in_hardening_begins_at_once_and_says_so(tmp_path, caplog, total):
    before = [float(hardness(raw, 0.1)) for raw in raw_values(tiny_model())]
    trainer, seen = run(tmp_path, num_train_epochs=total)
    check_path(trainer.model, seen, epochs(total, 3), total, switch=0)
    assert [float(hardness(raw, 0.1)) for raw in raw_values(trainer.model)] == before
    assert caplog.text.count("hardening begins at once and λ is never learned") == 1


@pytest.mark.parametrize(
    ("option", "switch", "end"),
    [
        ({"switch_fraction": 0.0}, 0, TARGET),
        ({"switch_fraction": 0.5}, 4, TARGET),
        ({"switch_fraction": 0.99}, 7, TARGET),
        ({"target_hardness": 40.0}, 2, 40.0),
        ({"tolerance": 0.02}, 2, 2 / (0.02 * math.sqrt(2 * math.pi))),
    ],
)
def test_options_of_the_arguments(tmp_path, caplog, option, switch, end):
    trainer, seen = run(tmp_path, num_train_epochs=8, **option)
    check_path(trainer.model, seen, epochs(8, 3), 8, switch=switch, end=end)
    assert not caplog.records  # switch_fraction=0 was asked for


@pytest.mark.parametrize("granularity", ["epoch", "step"])
@pytest.mark.parametrize("schedule", SCHEDULE_FORMS)
def test_every_schedule_and_granularity(tmp_path, schedule, granularity):
    trainer, seen = run(
        tmp_path,
        num_train_epochs=5,
        hardening_schedule=schedule,
        hardening_granularity=granularity,
        eval_strategy="epoch",
        eval_dataset=rows(4, seed=1),
    )
    position_of = epochs(5, 3) if granularity == "epoch" else list(range(1, 16))
    check_path(trainer.model, seen, position_of, position_of[-1], schedule=schedule)
    assert seen.evaluated[1:] == seen.trained[5::3]  # from the epoch of the switch on


def test_callback_takes_the_same_options(tmp_path):
    hardening = {"target_hardness": 50.0, "switch_fraction": 0.4, "schedule": "inverse", "granularity": "step"}
    trainer, seen = run(tmp_path, plain=True, hardening=hardening, num_train_epochs=5)
    check_path(trainer.model, seen, list(range(1, 16)), 15, switch=6, end=50.0, schedule="inverse")


def test_a_callback_of_ones_own_takes_the_place_of_the_arguments(tmp_path):
    trainer, seen = run(tmp_path, num_train_epochs=4, callbacks=[HardeningCallback(target_hardness=30.0)])
    check_path(trainer.model, seen, epochs(4, 3), 4, end=30.0)


# What makes counting hard


@pytest.mark.parametrize("granularity", ["epoch", "step"])
def test_accumulation_with_an_odd_number_of_batches(tmp_path, granularity):
    """5 batches, 2 per update: updates of 2, 2 and 1 batches; λ moves between updates only."""
    trainer, seen = run(
        tmp_path,
        train=rows(20),
        num_train_epochs=8,
        gradient_accumulation_steps=2,
        hardening_granularity=granularity,
    )
    assert trainer.state.global_step == 24
    if granularity == "epoch":
        check_path(trainer.model, seen, epochs(8, 5), 8)
    else:
        updates = [3 * epoch + update for epoch in range(8) for update in (1, 1, 2, 2, 3)]
        check_path(trainer.model, seen, updates, 24)


@pytest.mark.parametrize("granularity", ["epoch", "step"])
@pytest.mark.parametrize(("max_steps", "total"), [(15, 5), (13, 5), (10, 4), (12, 4), (2, 1)])
def test_max_steps(tmp_path, max_steps, total, granularity):
    """3 steps an epoch: T is the number of epochs begun, whole or not; num_train_epochs does not count."""
    trainer, seen = run(tmp_path, max_steps=max_steps, num_train_epochs=77, hardening_granularity=granularity)
    if granularity == "epoch":
        check_path(trainer.model, seen, epochs(total, 3)[:max_steps], total)
    else:
        check_path(trainer.model, seen, list(range(1, max_steps + 1)), max_steps)


@pytest.mark.parametrize(("fraction", "steps", "total"), [(4.5, 14, 5), (7.1, 22, 8), (0.5, 2, 1)])
def test_fractional_epochs(tmp_path, fraction, steps, total):
    trainer, seen = run(tmp_path, num_train_epochs=fraction)
    check_path(trainer.model, seen, epochs(total, 3)[:steps], total)


@pytest.mark.parametrize("granularity", ["epoch", "step"])
def test_evaluation_in_the_middle_of_an_epoch_sees_the_current_hardness(tmp_path, granularity):
    """Evaluated after every second of 3 steps; comparing the substitution does not disturb the run."""
    options = {"num_train_epochs": 5, "hardening_granularity": granularity, "train": rows(12)}
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": rows(4, seed=1)}
    trainer, seen = run(tmp_path, **options, **evaluation, model=tiny_model(dropout=0.2))
    positions = epochs(5, 3) if granularity == "epoch" else list(range(1, 16))
    check_path(trainer.model, seen, positions, positions[-1])
    evaluated = [2, 4, 6, 8, 10, 12, 14, 15]
    assert len(seen.evaluated) == len(evaluated)
    for step, values in zip(evaluated, seen.evaluated, strict=True):
        if step > 3:
            assert values == seen.trained[step - 1]
    undisturbed, _ = run(tmp_path, **options, **evaluation, report_substitution=False, model=tiny_model(dropout=0.2))
    assert_same_state(state_of(trainer.model), state_of(undisturbed.model))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")  # its new name is not in every version that is supported
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_gradient_checkpointing_with_accumulation(tmp_path, family, reentrant):
    """Recomputing the forward pass must recompute it at the same λ: the weights end bit-identical."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (10, 6), generator=generator)
    if family == "gpt2":
        samples = [{"input_ids": row, "labels": row} for row in tokens]
    else:
        samples = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]
    ends = []
    for checkpointing in (False, True):
        trainer, seen = run(
            tmp_path,
            model=transformer(family),
            train=samples,
            per_device_train_batch_size=2,
            num_train_epochs=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        check_path(trainer.model, seen, epochs(4, 5), 4)
        ends.append(state_of(trainer.model))
    assert_same_state(*ends)


def transformer(family):
    torch.manual_seed(0)
    if family == "gpt2":
        config = GPT2Config(activation_function="lambda_gelu", n_layer=2, n_embd=8, n_head=2, vocab_size=11)
        return GPT2LMHeadModel(config)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(hidden_act="lambda_gelu", vocab_size=11, **sizes))


@pytest.mark.parametrize("granularity", ["epoch", "step"])
def test_bfloat16_autocast(tmp_path, granularity):
    """λ and s stay float32, to the last bit of the formula."""
    trainer, seen = run(tmp_path, num_train_epochs=4, bf16=True, hardening_granularity=granularity)
    positions = epochs(4, 3) if granularity == "epoch" else list(range(1, 13))
    check_path(trainer.model, seen, positions, positions[-1])
    assert trainer.accelerator.mixed_precision == "bf16"


class Stream(IterableDataset):
    """Data without a length."""

    def __iter__(self):
        return itertools.cycle(rows(12))


def test_data_without_a_length_hardens_by_step_and_is_refused_by_epoch(tmp_path):
    trainer, seen = run(tmp_path, train=Stream(), max_steps=9, hardening_granularity="step")
    check_path(trainer.model, seen, list(range(1, 10)), 9)
    with pytest.raises(ValueError, match="has no length, so epochs cannot be counted; harden with granularity='step'"):
        run(tmp_path, train=Stream(), max_steps=9)


def test_a_second_training_begins_soft_again(tmp_path):
    trainer, _ = run(tmp_path, num_train_epochs=4)
    with watched(trainer.model) as seen:
        trainer.train()
    check_path(trainer.model, seen, epochs(4, 3), 4)


def test_gradients_are_clipped_without_s_while_it_is_frozen(tmp_path):
    """Trainer clips before the callback drops s.grad; a gradient of s would shrink everybody's step."""
    norms = {"all": [], "weights": []}

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            weights = [p.grad for name, p in model.named_parameters() if not name.endswith("raw_hardness")]
            norms["weights"].append(torch.nn.utils.get_total_norm(weights).item())

        def on_log(self, args, state, control, logs, **kwargs):
            if "grad_norm" in logs:
                norms["all"].append(logs["grad_norm"])

    logs = {"logging_strategy": "steps", "logging_steps": 1, "max_grad_norm": 1e9}
    run(tmp_path, num_train_epochs=4, callbacks=[Norms()], **logs)
    together = [a == pytest.approx(b, rel=1e-6) for a, b in zip(norms["all"], norms["weights"], strict=True)]
    assert together == [False] * 3 + [True] * 9


# What is refused


def test_target_and_tolerance_together_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"give target_hardness or tolerance, not both \(got 100 and 0.005\)"):
        HardeningCallback(target_hardness=100, tolerance=0.005)
    with pytest.raises(ValueError, match="give target_hardness or tolerance, not both"):
        tiny_trainer(tmp_path, harden=True, target_hardness=100.0, tolerance=0.005)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "batch"}, "unknown granularity 'batch' of hardening; accepted: epoch, step"),
        ({"schedule": "steep"}, "unknown schedule 'steep'; accepted: linear"),
        ({"switch_fraction": 1.0}, r"switch_fraction must lie in \[0, 1\), got 1.0"),
        ({"target_hardness": 1.0}, "target_hardness must be a finite number > 1, got 1.0"),
        ({"tolerance": 0.0}, "tolerance must lie in"),
    ],
)
def test_wrong_options_are_refused_before_training(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        HardeningCallback(**options)
    of_arguments = {"granularity": "hardening_granularity", "schedule": "hardening_schedule"}
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, harden=True, **{of_arguments.get(name, name): value for name, value in options.items()})


@pytest.mark.parametrize("plain", [False, True])
def test_a_model_without_lambda_gelu_is_refused(tmp_path, plain):
    options = {} if plain else {"require_lambda_gelu": False}
    with pytest.raises(ValueError, match="TinyClassifier has no λ-GELU activation"):
        run(tmp_path, model=tiny_model("gelu"), plain=plain, **options)


def test_default_target_and_options():
    callback = HardeningCallback()
    assert callback.target_hardness == pytest.approx(TARGET, rel=1e-15)
    assert (callback.switch_fraction, callback.schedule, callback.granularity) == (0.25, "linear", "epoch")


def test_progress_is_the_position_of_the_trainer():
    """Stateless: epoch fractions, as after a resume in the middle of an epoch, count as the epoch they are in."""
    by_epoch, by_step = HardeningCallback(), HardeningCallback(granularity="step")

    def at(epoch, step=0, total_epochs=8, total_steps=80):
        return SimpleNamespace(epoch=epoch, global_step=step, num_train_epochs=total_epochs, max_steps=total_steps)

    for epoch, expected in ((None, None), (0, None), (1.99, None), (2.0, 1 / 6), (2.6, 1 / 6), (7.0, 1), (8.0, 1)):
        assert by_epoch.progress(at(epoch)) == expected
    for step, expected in ((0, None), (19, None), (20, 1 / 60), (78, 59 / 60), (79, 1), (80, 1)):
        assert by_step.progress(at(0.5, step)) == expected
    assert by_epoch.progress(at(1.0, total_epochs=2**40)) is None
    assert sys.maxsize > 2**40  # the number that stands for "no length" is refused, a large one is not


def test_release_after_training_brings_the_learned_hardness_back(tmp_path):
    trainer, seen = run(tmp_path, num_train_epochs=4)
    release_hardness(trainer.model)
    learned = [float(hardness(raw, 0.1)) for raw in seen.trained_raw[-1]]
    assert hardness_values(trainer.model) == pytest.approx(learned, rel=1e-6)
