"""Hardening that measures: targets of each layer, and λ only as fast as the predictions follow."""

import math

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from closed_forms import hardness
from tiny_training import (
    assert_same_state,
    batch,
    lambda_gelus,
    raw_values,
    rows,
    state_of,
    tiny_model,
    tiny_trainer,
    watched,
)
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerState

from hf_lgelu import HardeningCallback, hardness_profile, is_hardened, layer_targets
from hf_lgelu.activation.gates import GATES
from hf_lgelu.training.adaptive import decided_once, largest_move, mean_divergence

HELD_OUT = rows(10, seed=1)
EPOCHS, STEPS, SWITCH = 8, 5, 2
RUN = {"train": rows(20), "num_train_epochs": EPOCHS, "learning_rate": 0.05}
TARGETS, PROGRESS = "hardening/targets", "hardening/progress"


def run(folder, checkpoint=None, seed=0, dropout=0.2, plain=False, **options):
    """Dropout makes the run depend on the random state as well."""
    options |= {} if plain else {"harden": True, "eval_dataset": HELD_OUT}
    trainer = tiny_trainer(folder, tiny_model(seed=seed, dropout=dropout), plain=plain, **{**RUN, **options})
    with watched(trainer.model) as seen:
        trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, seen


def notes(trainer, key):
    return [(entry["epoch"], entry[key]) for entry in trainer.state.log_history if key in entry]


# How far λ may go


@pytest.mark.parametrize("start", [0.0, 0.3])
@pytest.mark.parametrize("bound", [0.0, 1e-3, 0.02, 0.47, 1.0, 2.0])
@pytest.mark.parametrize("shape", [1.0, 3.0, 0.2])
def test_the_largest_move_is_that_of_a_plain_search(start, bound, shape):
    def gap(progress):
        return ((progress - start) / (1 - start)) ** shape

    found = start
    for k in range(1, 1025):
        progress = start + k / 1024 * (1 - start)
        if gap(progress) <= bound:
            found = progress
    assert largest_move(gap, start, bound) == pytest.approx(found, abs=1e-9)


def probabilities(model, sample, hardnesses):
    """Of the network with these λ, from its weights in float64."""
    x = sample["features"].double()
    for linear, value in zip(model.linears, hardnesses, strict=True):
        z = linear.weight.double() @ x + linear.bias.double()
        x = z * 0.5 * (1 + torch.erf(value * z / math.sqrt(2)))
    x = (x - x.mean()) / (x.var(correction=0) + model.norm.eps).sqrt()
    x = x * model.norm.weight.double() + model.norm.bias.double()
    return (model.classifier.weight.double() @ x + model.classifier.bias.double()).softmax(0)


@torch.no_grad()
def divergence(model, before, after):
    """Mean KL over the data held out, in a plain loop."""
    total = 0.0
    for sample in HELD_OUT:
        p, q = probabilities(model, sample, before), probabilities(model, sample, after)
        total += sum((p[k] * (p[k] / q[k]).log()).item() for k in range(3))
    return total / len(HELD_OUT)


@torch.no_grad()
def test_the_gap_is_the_mean_divergence_of_the_predictions_that_count():
    model = tiny_model()

    def at(value):
        def move():
            for module in lambda_gelus(model):
                module.hardness_override.fill_(value)

        return move

    given = [batch(HELD_OUT[:4]), batch(HELD_OUT[4:])]
    wanted = divergence(model, [1.5, 1.5], [9.0, 9.0])
    assert wanted > 1e-3
    assert mean_divergence(model, given, at(1.5), at(9.0)) == pytest.approx(wanted, rel=1e-4)
    assert mean_divergence(model, given, at(9.0), at(9.0)) == 0.0
    given[1]["labels"][:] = -100
    alone = mean_divergence(model, given, at(1.5), at(9.0))
    with_unknown = mean_divergence(model, [{"features": given[0]["features"]}], at(1.5), at(9.0))
    assert alone == with_unknown != pytest.approx(wanted, rel=1e-2)
    with pytest.raises(ValueError, match=r"compares predictions of classes, .* a tensor of shape \(4, 1\), holds none"):
        mean_divergence(torch.nn.Linear(5, 1), [given[0]["features"]], at(1.5), at(9.0))
    with pytest.raises(ValueError, match="no prediction to measure on"):
        mean_divergence(model, given[1:], at(1.5), at(9.0))


@pytest.fixture(scope="module", params=[0.001, 0.004])
def bounded(request, tmp_path_factory):
    """(bound, folder, trainer, λ seen) of a run whose λ moves as far as the predictions follow."""
    folder = tmp_path_factory.mktemp("bounded")
    options = {"hardening_rate": "tolerance", "rate_tolerance": request.param, "hardening_schedule": "geometric"}
    return request.param, folder, options, *run(folder, save_strategy="steps", save_steps=1, **options)


def test_the_advance_is_that_of_a_plain_loop(bounded):
    """From the checkpoint with which each epoch begins: search the progress, by formulas of the forward pass alone."""
    bound, folder, _, trainer, seen = bounded
    target = GATES["lambda_gelu"].width / 5e-3
    start = [float(hardness(raw, 0.1)) for raw in raw_values(trainer.model)]
    progress, path = 0.0, []

    def at(share):
        return [value ** (1 - share) * target**share for value in start]

    for epoch in range(SWITCH, EPOCHS):
        model = type(trainer.model).from_pretrained(folder / f"checkpoint-{epoch * STEPS}")
        grid = [progress + k / 1024 * (1 - progress) for k in range(1025)]
        if epoch == EPOCHS - 1:
            progress = 1.0
        else:
            low, high = 0, 1025  # gap at grid[low] is within the bound
            while high - low > 1:
                middle = (low + high) // 2
                within = divergence(model, at(progress), at(grid[middle])) <= bound
                low, high = (middle, high) if within else (low, middle)
            progress = grid[low]
        path.append((float(epoch), progress))
        for step in range(STEPS):
            assert seen.trained[epoch * STEPS + step] == pytest.approx(at(progress), rel=1e-5), epoch
    assert notes(trainer, PROGRESS) == [(epoch, pytest.approx(progress, abs=1e-9)) for epoch, progress in path]
    assert path[0][1] < 1
    assert path == sorted(path)
    assert seen.trained[-1] == pytest.approx([target] * 2, rel=1e-7)


def test_it_is_resumed_from_the_middle_bit_for_bit(bounded, tmp_path):
    bound, folder, options, whole, seen = bounded
    for step in {0.001: (12, 28, 36), 0.004: (28,)}[bound]:
        resumed, tail = run(tmp_path, checkpoint=str(folder / f"checkpoint-{step}"), seed=99, **options)
        assert tail.trained == seen.trained[step:]
        assert_same_state(state_of(resumed.model), state_of(whole.model))
        assert notes(resumed, PROGRESS) == notes(whole, PROGRESS)


def test_a_bound_of_0_waits_for_the_last_epoch_and_a_wide_one_does_not(tmp_path):
    for bound, path in ((0.0, [0.0] * 5 + [1.0]), (1e9, [1.0] * 6)):
        trainer, _ = run(tmp_path, hardening_rate="tolerance", rate_tolerance=bound)
        assert [share for _, share in notes(trainer, PROGRESS)] == path


# Targets


def test_targets_are_measured_when_s_freezes_and_hardening_ends_there(tmp_path):
    trainer, seen = run(tmp_path, target_hardness="measured", tolerance=0.004, save_strategy="epoch")
    frozen = type(trainer.model).from_pretrained(tmp_path / f"checkpoint-{SWITCH * STEPS}")
    wanted = layer_targets(frozen, batch(HELD_OUT), tolerance=0.004)
    ((epoch, targets),) = notes(trainer, TARGETS)
    assert (epoch, targets) == (float(SWITCH), pytest.approx(wanted, rel=1e-6))
    assert len(set(targets.values())) == 2
    start = list(hardness_profile(frozen).values())
    assert all(target > value for target, value in zip(targets.values(), start, strict=True))
    for epoch in range(SWITCH, EPOCHS):
        share = (epoch + 1 - SWITCH) / (EPOCHS - SWITCH)
        path = [s + share * (t - s) for s, t in zip(start, targets.values(), strict=True)]
        assert seen.trained[epoch * STEPS] == pytest.approx(path, rel=1e-6)
    assert is_hardened(trainer.model, targets, fraction=1 - 1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"hardening_strategy": "steps"},
        {
            "hardening_switch": "plateau",
            "switch_fraction": 0.5,
            "plateau_tolerance": 1e9,
            "hardening_rate": "tolerance",
        },
    ],
)
def test_measured_targets_are_resumed_bit_for_bit(tmp_path, options):
    options |= {"target_hardness": "measured"}
    whole, seen = run(tmp_path, save_strategy="steps", save_steps=1, **options)
    assert len(notes(whole, TARGETS)) == 1
    for step in (8, 10, 11, 13, 27):
        resumed, tail = run(tmp_path / "r", checkpoint=str(tmp_path / f"checkpoint-{step}"), seed=99, **options)
        assert tail.trained == seen.trained[step:]
        assert_same_state(state_of(resumed.model), state_of(whole.model))
        assert notes(resumed, TARGETS) == notes(whole, TARGETS)


def test_in_a_plain_trainer_it_takes_data_and_a_harder_gate_stays(tmp_path):
    callback = HardeningCallback("measured", tolerance=0.9, data=batch(HELD_OUT))
    trainer, seen = run(tmp_path, plain=True, callbacks=[callback])
    learned = [float(hardness(raw, 0.1)) for raw in raw_values(trainer.model)]
    assert seen.trained[-1] == pytest.approx(learned, rel=1e-6)


def test_no_epoch_is_the_best_before_there_are_targets(tmp_path):
    common = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    trainer, _ = run(tmp_path, target_hardness="measured", metric_for_best_model="loss", **common)
    first = int(trainer.state.best_model_checkpoint.rpartition("-")[2]) // STEPS
    assert first > SWITCH
    assert is_hardened(trainer.model, dict(notes(trainer, TARGETS))[float(SWITCH)])


def test_a_decision_is_made_once_an_epoch():
    state, made = TrainerState(), []

    def decide():
        made.append(len(made))
        return made[-1]

    assert [decided_once(state, "key", epoch, decide) for epoch in (1, 1, 2, 1, 2)] == [0, 0, 1, 0, 1]
    assert [(entry["key"], entry["epoch"]) for entry in state.log_history] == [(0, 0.0), (1, 1.0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": "fast"}, "unknown rate 'fast' of hardening; accepted: schedule, tolerance"),
        ({"rate_tolerance": -1.0}, "rate_tolerance must be a finite number >= 0, got -1.0"),
        ({"rate_tolerance": 0.5}, "rate_tolerance counts with rate='tolerance' alone"),
        ({"rate": "tolerance", "strategy": "steps"}, "measures once an epoch: harden with strategy='epoch'"),
        ({"target_hardness": "soft"}, "target_hardness must be a number, or one by name, or 'measured', got 'soft'"),
        ({"target_hardness": "measured", "tolerance": 1.0}, r"tolerance must be a number in \(0, 1\), got 1.0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HardeningCallback(**options)


@pytest.mark.parametrize("options", [{"target_hardness": "measured"}, {"hardening_rate": "tolerance"}])
def test_without_data_to_measure_on_it_does_not_begin(tmp_path, options):
    with pytest.raises(ValueError, match=r"give HardeningCallback\(data=...\), or LambdaGELUTrainer an eval_dataset"):
        tiny_trainer(tmp_path, harden=True, **options).train()
    with pytest.raises(ValueError, match="give HardeningCallback"):
        tiny_trainer(tmp_path, harden=True, eval_dataset=[], **options).train()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(HELD_OUT)


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("held_out", [HELD_OUT, Stream()], ids=["rows", "a stream"])
def test_each_of_two_processes_measures_on_the_same_first_batches(tmp_path, monkeypatch, held_out, process):
    """accelerate would give the second process of a stream every other batch."""
    trainer = tiny_trainer(tmp_path, harden=True, eval_dataset=held_out, target_hardness="measured")

    def shared_out(dataset):
        loader = DataLoader(dataset, batch_size=trainer.args.eval_batch_size, collate_fn=trainer.data_collator)
        return prepare_data_loader(loader, num_processes=2, process_index=process, put_on_device=False)

    monkeypatch.setattr(trainer, "get_eval_dataloader", shared_out)
    found = torch.cat([each["features"] for each in trainer._batches_to_measure_on()])
    count = min(8 * trainer.args.eval_batch_size, len(HELD_OUT))
    assert torch.equal(found, torch.stack([row["features"] for row in HELD_OUT[:count]]))


@pytest.mark.parametrize(
    ("options", "held_out", "message"),
    [
        ({"hardening_rate": "tolerance"}, [{"features": torch.zeros(5)}], "holds none; harden with rate='schedule'"),
        ({"target_hardness": "measured"}, [{"anchor": torch.zeros(5)}], r"does not take a batch .* model\(\*\*batch\)"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_step(tmp_path, options, held_out, message):
    class OneNumber(type(tiny_model())):
        def forward(self, features, labels=None):
            out = super().forward(features, labels)
            return {"loss": out.loss, "logits": out.logits[:, :1]}

    model = OneNumber(tiny_model().config)
    trainer = tiny_trainer(tmp_path, model, harden=True, num_train_epochs=4, remove_unused_columns=False,
                           eval_dataset=held_out, **options)  # fmt: skip
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0
