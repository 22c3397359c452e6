"""What the processes that share the work must have alike: sums over all of them, and what the main one decides.

Every process must call. Of one process alone each of these gives what it was given. Where another one has ended in the
meantime, each raises RuntimeError.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env, reduce
from torch import Tensor

Decided = TypeVar("Decided")


def known_processes() -> PartialState:
    """The processes that share the work, of accelerate; on CPUs where its launcher was told so.

    accelerate reads ACCELERATE_USE_CPU in Accelerator alone; without it, processes on CPUs would not know of each
    other.
    """
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


def summed(value: Tensor) -> Tensor:
    """Over all processes, the same bits on each."""
    return value if known_processes().num_processes == 1 else _together(reduce, value, reduction="sum")


def mean_of_rows(total: Tensor, count: float) -> Tensor:
    """Over the rows of all processes, of which each gives its sum and how many they are; 0 where there is none."""
    return summed(total) / summed(total.new_tensor(count)).clamp(min=1)


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Of the parts of a loss that the processes have; a parameter that a part does not reach has none of it."""
    if known_processes().num_processes == 1:
        return
    for parameter in parameters:
        parameter.grad = summed(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def each_has(value: Decided) -> list[Decided]:
    """What each process has, in their order."""
    return [value] if known_processes().num_processes == 1 else _together(gather_object, [value])


def main_decides(value: Decided) -> Decided:
    """What the main process has: clocks and scores differ."""
    return value if known_processes().num_processes == 1 else _together(broadcast_object_list, [value])[0]


def wait_for_all() -> None:
    """Until every process is here."""
    _together(PartialState().wait_for_everyone)


@contextmanager
def main_process_first() -> Iterator[None]:
    """The main process is through the block before the others enter it."""
    is_main = PartialState().is_main_process
    if not is_main:
        wait_for_all()
    yield
    if is_main:
        wait_for_all()


def _together(call: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """A call that all processes make. What the backend says of one that is gone tells nobody what to do."""
    try:
        return call(*given, **options)
    except RuntimeError as error:
        raise RuntimeError(
            f"the {PartialState().num_processes} processes have lost each other, most often because one has ended, "
            "which says why itself unless it was killed. Started again, as many go on from what a checkpoint_dir "
            f"(--resume) kept. ({error})"
        ) from error
