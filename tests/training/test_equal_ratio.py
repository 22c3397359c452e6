"""Under SGD only c/t² matters: s = t·σ⁻¹ is a change of units, and the step of λ is −η·c·(σ(s/t)/t)²·∂L/∂λ."""

import pytest
from tiny_training import hardness_values, rows, tiny_model, tiny_trainer, watched

from hf_lgelu import initialize_hardness


def path(folder, temperature, multiplier, optimizer="sgd"):
    """λ of both layers at each of 60 steps, from λ = 1.5 and 2.5."""
    model = tiny_model()
    initialize_hardness(model, "increasing", init_hardness=1.5, high_hardness=2.5, temperature=temperature)
    trainer = tiny_trainer(
        folder,
        model,
        train=rows(48),
        num_train_epochs=5,
        optim=optimizer,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        max_grad_norm=0.0,  # clipping would see the gradient of s, which is in units of 1/t
        hardness_lr_multiplier=multiplier,
        seed=3,
    )
    with watched(model) as seen:
        trainer.train()
    assert len(seen.trained) == 60
    return [*seen.trained, hardness_values(model)]


def furthest(one, other):
    """The largest relative distance of two paths."""
    return max(abs(a - b) / a for step in zip(one, other, strict=True) for a, b in zip(*step, strict=True))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    steps = path(tmp_path_factory.mktemp("reference"), 0.1, 1.0)
    for values in zip(*steps, strict=True):
        assert max(values) - min(values) > 0.05  # 3 % of λ, thousands of times the tolerance below
    return steps


def test_equal_ratio_and_equal_start_give_the_same_path(tmp_path, reference):
    """Equal but for float32: a step rounds s by at most 2⁻²⁴·|s|, which with |s|/t < 2 moves λ by at most 2⁻²³ of it.
    60 steps add up to 7e-6 if all of them err to one side.
    """
    assert furthest(reference, path(tmp_path, 0.3, 9.0)) < 7e-6


def test_another_ratio_gives_another_path(tmp_path, reference):
    """(0.3, 3) has the same c/t, which is what counts under AdamW and not here."""
    assert furthest(reference, path(tmp_path, 0.3, 3.0)) > 0.02


def test_under_adamw_it_is_c_over_t_that_counts(tmp_path):
    """Adam's step has no units of its gradient; its ε does, so the paths are not as close."""
    one = path(tmp_path, 0.1, 1.0, "adamw_torch")
    assert furthest(one, path(tmp_path, 0.3, 3.0, "adamw_torch")) < 1e-4
