"""Values that all processes of a conversion must share: sums over the processes, and decisions of the main process.

Every process must call these functions. With a single process, each returns its argument. If another process has
ended, each raises RuntimeError.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env, reduce
from torch import Tensor

Decided = TypeVar("Decided")
Item = TypeVar("Item")


def known_processes() -> PartialState:
    """The state of accelerate's processes; it is on CPUs if ACCELERATE_USE_CPU says so.

    accelerate reads this variable only in Accelerator. Otherwise processes on CPUs would not find each other.
    """
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


def own_part(work: Sequence[Item]) -> list[Item]:
    """This process's part of the work of n processes: every n-th item, from the process's own number on."""
    processes = known_processes()
    return list(work[processes.process_index :: processes.num_processes])


def summed(value: Tensor) -> Tensor:
    """The sum of a tensor over all processes, the same bits on each."""
    return value if known_processes().num_processes == 1 else _together(partial(reduce, reduction="sum"), value)


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Add up each parameter's gradient over all processes; a missing gradient counts as zero."""
    if known_processes().num_processes == 1:
        return
    for parameter in parameters:
        parameter.grad = summed(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def each_has(value: Decided) -> list[Decided]:
    """The values of all processes, in the order of the processes."""
    return [value] if known_processes().num_processes == 1 else _together(gather_object, [value])


def _together(call: Callable[[Any], Any], value: Any) -> Any:
    """The result of a call that all processes make. If a process is gone, an error says what to do."""
    try:
        return call(value)
    except RuntimeError as error:
        raise RuntimeError(
            f"the {PartialState().num_processes} processes have lost contact; usually one has exited. Its own "
            f"traceback says why; it has none if it was killed ({error})"
        ) from error
