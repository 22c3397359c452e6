"""Runs that harden, and λ of their forward passes held against Algorithm 1 by hand."""

import pytest
import torch
from closed_forms import hardened, hardness, progress_at, target
from tiny_training import lambda_gelus, raw_values, tiny_model, tiny_trainer, watched

from hf_lgelu import HardeningCallback

TARGET = float(target())


def run(folder, *, plain=False, model=None, hardening=None, **options):
    """Train; return the trainer and the λ of all forward passes."""
    model = tiny_model() if model is None else model
    if plain:
        options["callbacks"] = [HardeningCallback(hardening)]
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
