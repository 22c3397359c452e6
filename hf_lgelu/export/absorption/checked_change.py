"""A change of a model that must leave its outputs: made, compared, and taken back where it does not."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_lgelu.models.comparison import all_numbers, discrete_outputs
from hf_lgelu.models.example_run import Inputs, run_example

_FLIPPED = 0.01  # of the codes that a model gives, those that rounding may tip over


def change_keeping_outputs(
    model: nn.Module,
    inputs: Inputs,
    change: Callable[[], None],
    undo: Callable[[], None],
    *,
    allowed: Callable[[Tensor], float],
    changed: str,
) -> None:
    """Carry out `change`; where `model` then gives other outputs on `inputs`, `undo` it and raise ValueError.

    A model whose outputs differ from call to call by themselves, by random numbers that are not torch's, cannot be held
    to them, and is changed all the same.

    Args:
        undo: must also take back a change that broke off.
        allowed: how far a number of an output may move, of the output before.
        changed: how the message names what was done, as in "with its units rescaled".
    """
    before = run_example(model, inputs)
    try:
        change()
        after = run_example(model, inputs)
    except BaseException:  # also of memory, or of who waits
        undo()
        raise
    if _agree(before, after, allowed):
        return
    undo()
    if not _agree(before, run_example(model, inputs), allowed):
        change()
        return
    raise ValueError(
        f"{changed} {type(model).__name__} gives other outputs, and it is as it was. What it computes with may lie in "
        "the memory of one of its weights without being registered: make it a parameter or a buffer. Or numbers inside "
        "leave the range of their dtype: give the model in a wider one (model.float())"
    )


def _agree(before: Any, after: Any, allowed: Callable[[Tensor], float]) -> bool:
    """Up to rounding: new weights are rounded, and kernels of a GPU may sum in another order at each call."""
    return _pairs_agree(
        all_numbers(before),
        all_numbers(after),
        lambda one, other: torch.allclose(one, other, rtol=0, atol=allowed(one), equal_nan=True),
    ) and _pairs_agree(
        discrete_outputs(before),
        discrete_outputs(after),
        lambda one, other: int((one != other).sum()) <= _FLIPPED * one.numel(),
    )


def _pairs_agree(before: Sequence[Tensor], after: Sequence[Tensor], agree: Callable[[Tensor, Tensor], bool]) -> bool:
    return [tensor.shape for tensor in before] == [tensor.shape for tensor in after] and all(
        agree(one, other) for one, other in zip(before, after, strict=True)
    )
