"""A change of a model that must leave its outputs: made, compared, and taken back where it does not."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_lgelu.models.example_run import Inputs, run_example
from hf_lgelu.models.outputs import agree, floating_outputs, named_tensors

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
    (numbers, codes), (new_numbers, new_codes) = map(_numbers_and_codes, (before, after))
    return (
        agree(numbers, new_numbers, allowed)
        and [code.shape for code in codes] == [code.shape for code in new_codes]
        and all(
            int((one != other).sum()) <= _FLIPPED * one.numel() for one, other in zip(codes, new_codes, strict=True)
        )
    )


def _numbers_and_codes(output: Any) -> tuple[list[Tensor], list[Tensor]]:
    tensors = [tensor for _, tensor in named_tensors(output)]
    pairs = [torch.view_as_real(tensor.resolve_conj()) for tensor in tensors if tensor.is_complex()]
    codes = [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
    return [*floating_outputs(output), *pairs], codes
