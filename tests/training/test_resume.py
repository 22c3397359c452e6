"""A run resumed from any of its checkpoints is the run that was never interrupted, bit for bit."""

import pytest
import torch
from tiny_training import (
    assert_same_state,
    hardness_values,
    raw_values,
    rows,
    state_of,
    tiny_model,
    tiny_trainer,
    watched,
)

from hf_lgelu import HardeningCallback, HardeningConfig

# 5 batches, 2 per update, 5 epochs: updates 1-3 are soft, 4-15 harden; of each epoch, two lie in its middle.
RUN = {
    "train": rows(20),
    "num_train_epochs": 5,
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.01,
    "lr_scheduler_type": "cosine",
}
EVALUATION = {"eval_strategy": "epoch", "eval_dataset": rows(6, seed=1)}
FORWARDS_BEFORE = [0, 2, 4, 5]  # forward passes of 0, 1, 2, 3 updates of an epoch


def run(folder, strategy, plain=False, checkpoint=None, seed=0, dropout=0.2, **options):
    """Dropout makes the run depend on the random state as well."""
    if plain:
        options["callbacks"] = [HardeningCallback(HardeningConfig(hardening_strategy=strategy))]
    else:
        options |= {"harden": True, "hardening_strategy": strategy}
    model = tiny_model(dropout=dropout, seed=seed)
    trainer = tiny_trainer(folder, model, plain=plain, **RUN, **options)
    with watched(model) as seen:
        trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, seen


def optimizer_state(trainer):
    return [
        {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        for state in trainer.optimizer.state_dict()["state"].values()
    ]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("epoch", {}),
        ("steps", {}),
        # The last step of an epoch is saved before its evaluation, which draws a random number that a resumed run
        # does not draw (with any activation, in transformers' Trainer as well): so without dropout.
        ("epoch", {**EVALUATION, "dropout": 0.0}),
    ],
)
def test_resuming_from_a_checkpoint(tmp_path, strategy, options):
    whole, seen = run(tmp_path, strategy, save_strategy="steps", save_steps=1, **options)
    assert len(seen.trained) == 25
    assert len({tuple(values) for values in seen.trained}) == 3 + (4 if strategy == "epoch" else 12)
    for step in (1, 3, 5) if (strategy, options) == ("epoch", {}) else (1, 8):
        folder = str(tmp_path / f"checkpoint-{step}")
        resumed, tail = run(tmp_path / "resumed", strategy, checkpoint=folder, seed=99, **options)
        assert resumed.state.global_step == 15
        before = 5 * (step // 3) + FORWARDS_BEFORE[step % 3]
        assert tail.trained == seen.trained[before:], step
        assert tail.trained_raw == seen.trained_raw[before:]
        assert_same_end(resumed, whole)


def assert_same_end(trainer, other):
    """The weights, s, and what the optimizer remembers of each."""
    assert_same_state(state_of(trainer.model), state_of(other.model))
    states = optimizer_state(trainer), optimizer_state(other)
    assert len(states[0]) == 10
    for state, expected in zip(*states, strict=True):
        assert_same_state(state, expected)


def test_a_checkpoint_of_the_middle_of_hardening_evaluates_as_the_run_did(tmp_path):
    """Without a trainer: what hardening has done is in the state dict."""
    trainer, seen = run(tmp_path, "steps", save_strategy="steps", save_steps=1)
    loaded = type(trainer.model).from_pretrained(tmp_path / "checkpoint-8")
    assert hardness_values(loaded) == seen.trained[5 * 2 + FORWARDS_BEFORE[2] - 1]
    assert 20 < hardness_values(loaded)[0] < 159
    assert raw_values(loaded) == seen.trained_raw[-1]


# Other networks

ONE_STEP = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        ("lambda_gelu", "relu", r"say other gates \(hidden_act\)"),
        ("relu", "lambda_gelu", r"say other gates \(hidden_act\)"),
        ("lambda_gelu", "lambda_silu", r"say other gates \(hidden_act\)"),
    ],
)
def test_another_network_does_not_resume(tmp_path, saved, resumed, message):
    tiny_trainer(tmp_path, tiny_model(saved), require_lambda_gelu=False, **ONE_STEP).train()
    model = tiny_model(resumed)
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path / "other", model, require_lambda_gelu=False).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )
    assert_same_state(state_of(model), before)
