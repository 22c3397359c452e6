"""What the processes that share the work must have alike: sums over all of them, and what the main one decides.

Every process must call. Of one process alone each of these gives what it was given.
"""

from collections.abc import Iterable
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, reduce
from torch import Tensor

Decided = TypeVar("Decided")


def summed(value: Tensor) -> Tensor:
    """Over all processes, the same bits on each."""
    return value if PartialState().num_processes == 1 else reduce(value, reduction="sum")


def summed_numbers(value: float) -> float:
    """Of a number of each process, wherever its tensors are."""
    return sum(each_has(value))


def mean_of_rows(total: Tensor, count: float) -> Tensor:
    """Over the rows of all processes, of which each gives its sum and how many they are; 0 where there is none."""
    return summed(total) / summed(total.new_tensor(count)).clamp(min=1)


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Of the parts of a loss that the processes have; a parameter that a part does not reach has none of it."""
    if PartialState().num_processes == 1:
        return
    for parameter in parameters:
        parameter.grad = summed(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def each_has(value: Decided) -> list[Decided]:
    """What each process has, in their order."""
    return [value] if PartialState().num_processes == 1 else gather_object([value])


def main_decides(value: Decided) -> Decided:
    """What the main process has: clocks and scores differ."""
    return value if PartialState().num_processes == 1 else broadcast_object_list([value])[0]
