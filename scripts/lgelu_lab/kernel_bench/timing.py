"""Times of several calls that take turns, round by round, in one process, and what they hold in memory."""

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any

import pandas
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], Any]
Clock = Callable[[Call, int], float]
"""(call, repetitions) → seconds of one call, as a mean over the repetitions."""

QUANTILES = {"q20": 0.2, "median": 0.5, "q80": 0.8}
MIN_ROUNDS = 5
SHORTEST_SECONDS = 2e-3
"""A timed stretch repeats its call until it lasts this long, so that the clock's own cost does not count."""

LONG_SECONDS = 0.1
"""A call that takes this long fills the caches itself and gets no warm-up of its own."""

_MOST_REPETITIONS = 10_000


def _clock_of(now: Callable[[], float]) -> Clock:
    def seconds(call: Call, repetitions: int) -> float:
        started = now()
        for _ in range(repetitions):
            call()
        return (now() - started) / repetitions

    return seconds


def _cuda_seconds(call: Call, repetitions: int) -> float:
    from triton.testing import do_bench  # events, with the second-level cache flushed before each call

    return do_bench(call, warmup=0, rep=1e3 * SHORTEST_SECONDS, return_mode="mean") / 1e3


CLOCKS: dict[str, Clock] = {
    "thread_time": _clock_of(time.thread_time),  # what others do on the machine does not count
    "perf_counter": _clock_of(time.perf_counter),  # on the wall, for several threads
    "cuda_event": _cuda_seconds,
}


def clock_name(device: str, threads: int) -> str:
    """The key of CLOCKS for this device and so many threads."""
    return "cuda_event" if device == "cuda" else "thread_time" if threads == 1 else "perf_counter"


def interleave(
    calls: Mapping[str, Call], clock: Clock, rounds: int, budget_seconds: float
) -> tuple[pandas.DataFrame, pandas.Series]:
    """Time each call once a round; each round begins with another of them.

    Args:
        calls: by name. Each is called a few times before it counts, to learn how often a stretch repeats it.
        clock: a value of CLOCKS.
        rounds: at most so many, and at least min(rounds, MIN_ROUNDS).
        budget_seconds: no further round once so much time on the wall has gone by.

    Returns:
        Seconds per call, a row a round and a column a call; and how often each call's stretch repeated it.
    """
    once = pandas.Series({name: _seconds_once(call, clock) for name, call in calls.items()}, dtype=float)
    repetitions = (SHORTEST_SECONDS / once.clip(lower=1e-9)).round().clip(1, _MOST_REPETITIONS).astype(int)
    seconds: list[dict[str, float]] = []
    names, collects = list(calls), gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        deadline = time.perf_counter() + budget_seconds
        for turn in count():
            if turn >= rounds or (turn >= MIN_ROUNDS and time.perf_counter() > deadline):
                break
            first = turn % len(names)
            seconds.append({})
            for name in names[first:] + names[:first]:
                if once[name] < LONG_SECONDS:
                    calls[name]()
                seconds[-1][name] = clock(calls[name], int(repetitions[name]))
    finally:
        if collects:
            gc.enable()
    return pandas.DataFrame(seconds, columns=names), repetitions


def summarize(seconds: pandas.DataFrame, reference: str) -> pandas.DataFrame:
    """A row a column: quantiles of its times, and of its ratios to the reference in the same round."""
    frames = {"milliseconds": 1e3 * seconds, "ratio": seconds.div(seconds[reference], axis="index")}
    parts = [
        frame.quantile(list(QUANTILES.values())).set_axis([f"{what}_{name}" for name in QUANTILES]).T
        for what, frame in frames.items()
    ]
    return pandas.concat(parts, axis=1).assign(rounds=len(seconds))


def _seconds_once(call: Call, clock: Clock) -> float:
    call()
    taken = clock(call, 1)
    return taken if taken >= LONG_SECONDS else clock(call, 1)


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes of the distinct storages that `forward` leaves for its backward pass."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = forward()  # held until the sum is made: a freed storage's address could be given out again
    total = resident_bytes(saved)
    del y
    return total


def peak_bytes(call: Call, device: str) -> int:
    """The most bytes that tensors made within `call` hold at one time, above what was held before it.

    On a CPU from the allocations that torch.profiler records, in their order. A TorchDispatchMode would see them too,
    but keeps λ-GELU's own kernels from running.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    # The public list puts the allocations within an operation to that operation, so their order is lost in it.
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = pandas.Series([0, *(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))])
    return int(held.cumsum().max())


def resident_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages under `tensors`."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
