"""Bytes that autograd keeps for the backward pass, and the most that a call holds at once."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes of the distinct storages that `forward` leaves for its backward pass."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        y = forward()  # held until the sum is made: a freed storage's address could be given out again
    total = sum(sizes.values())
    del y
    return total


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """The most bytes that tensors made within `call` hold at one time, above what was held before it.

    On a GPU from torch.cuda.max_memory_allocated; on a CPU from the allocations that torch.profiler records, in
    their order. A TorchDispatchMode would see them too, but keeps λ-GELU's own kernels from running.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    # The public list puts the allocations within an operation to that operation, so their order is lost in it.
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages under `tensors`."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
