"""Hardening where epochs and steps are hard to count, or the forward pass is more than one call."""

import itertools

import pytest
import small_networks as networks
import torch
from hardening_runs import check_path, epochs, run
from tiny_training import assert_same_state, rows, state_of, tiny_model, watched
from torch.utils.data import IterableDataset
from transformers import TrainerCallback


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
def test_accumulation_with_an_odd_number_of_batches(tmp_path, strategy):
    """5 batches, 2 per update: updates of 2, 2 and 1 batches; λ moves between updates only."""
    trainer, seen = run(
        tmp_path, train=rows(20), num_train_epochs=8, gradient_accumulation_steps=2, hardening_strategy=strategy
    )
    assert trainer.state.global_step == 24
    if strategy == "epoch":
        check_path(trainer.model, seen, epochs(8, 5), 8)
    else:
        updates = [3 * epoch + update for epoch in range(8) for update in (1, 1, 2, 2, 3)]
        check_path(trainer.model, seen, updates, 24)


@pytest.mark.parametrize(
    ("max_steps", "total", "strategy"),
    [(15, 5, "epoch"), (10, 4, "epoch"), (2, 1, "epoch"), (13, 5, "steps")],
)
def test_max_steps(tmp_path, max_steps, total, strategy):
    """3 steps an epoch: T is the number of epochs begun, whole or not; num_train_epochs does not count."""
    trainer, seen = run(tmp_path, max_steps=max_steps, num_train_epochs=77, hardening_strategy=strategy)
    if strategy == "epoch":
        check_path(trainer.model, seen, epochs(total, 3)[:max_steps], total)
    else:
        check_path(trainer.model, seen, list(range(1, max_steps + 1)), max_steps)


@pytest.mark.parametrize(("fraction", "steps", "total"), [(4.5, 14, 5), (0.5, 2, 1)])
def test_fractional_epochs(tmp_path, fraction, steps, total):
    trainer, seen = run(tmp_path, num_train_epochs=fraction)
    check_path(trainer.model, seen, epochs(total, 3)[:steps], total)


def test_evaluation_in_the_middle_of_an_epoch_sees_the_current_hardness(tmp_path):
    """Evaluated after every second of 3 steps; comparing the substitution does not disturb the run."""
    options = {"num_train_epochs": 4, "hardening_strategy": "steps", "train": rows(12)}
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": rows(4, seed=1)}
    trainer, seen = run(tmp_path, **options, **evaluation, model=tiny_model(dropout=0.2))
    check_path(trainer.model, seen, list(range(1, 13)), 12)
    evaluated = [2, 4, 6, 8, 10, 12]
    assert len(seen.evaluated) == len(evaluated)
    for step, values in zip(evaluated, seen.evaluated, strict=True):
        if step > 3:
            assert values == seen.trained[step - 1]
    undisturbed, _ = run(tmp_path, **options, **evaluation, report_substitution=False, model=tiny_model(dropout=0.2))
    assert_same_state(state_of(trainer.model), state_of(undisturbed.model))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")  # its new name is not in every version that is supported
def test_gradient_checkpointing_with_accumulation(tmp_path):
    """Recomputing the forward pass must recompute it at the same λ: the weights end bit-identical."""
    tokens = torch.randint(0, 11, (10, 6), generator=torch.Generator().manual_seed(0))
    ends = []
    for reentrant in (None, False):
        torch.manual_seed(0)
        trainer, seen = run(
            tmp_path,
            model=networks.gpt2(activation_function="lambda_gelu"),
            train=[{"input_ids": row, "labels": row} for row in tokens],
            per_device_train_batch_size=2,
            num_train_epochs=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=reentrant is not None,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        check_path(trainer.model, seen, epochs(4, 5), 4)
        ends.append(state_of(trainer.model))
    for end in ends[1:]:
        assert_same_state(end, ends[0])


def test_bfloat16_autocast(tmp_path):
    """λ and s stay float32, to the last bit of the formula."""
    trainer, seen = run(tmp_path, num_train_epochs=4, bf16=True)
    check_path(trainer.model, seen, epochs(4, 3), 4)
    assert trainer.accelerator.mixed_precision == "bf16"


class Stream(IterableDataset):
    """Data without a length."""

    def __iter__(self):
        return itertools.cycle(rows(12))


def test_data_without_a_length_hardens_by_step_and_is_refused_by_epoch(tmp_path):
    trainer, seen = run(tmp_path, train=Stream(), max_steps=9, hardening_strategy="steps")
    check_path(trainer.model, seen, list(range(1, 10)), 9)
    with pytest.raises(ValueError, match=r"no length.*hardening_strategy='steps'"):
        run(tmp_path, train=Stream(), max_steps=9)


class Short(IterableDataset):
    """Says that it has five batches, and has four."""

    def __len__(self):
        return 20

    def __iter__(self):
        return iter(rows(16))


class Cut(TrainerCallback):
    """Ends each epoch after two of its three steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step % 2 == 0


@pytest.mark.parametrize(("options", "batches"), [({"train": Short()}, 4), ({"callbacks": [Cut()]}, 2)])
def test_epochs_that_end_early_count(tmp_path, options, batches):
    trainer, seen = run(tmp_path, num_train_epochs=4, **options)
    check_path(trainer.model, seen, epochs(4, batches), 4)


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
