"""Times of several calls that take turns, round by round, in one process."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy
import torch

Call = Callable[[], Any]
Clock = Callable[[Call, int], float]
"""(call, repetitions) → seconds of one call, as a mean over the repetitions."""

QUANTILES = (0.2, 0.5, 0.8)
MIN_ROUNDS = 5
SHORTEST_SECONDS = 2e-3
"""A timed stretch repeats its call until it lasts this long, so that the clock's own cost does not count."""

LONG_SECONDS = 0.1
"""A call that takes this long fills the caches itself and gets no warm-up of its own."""

_FLUSHED_BYTES = 256 * 2**20  # more than the L2 cache of any GPU
_MOST_REPETITIONS = 10_000


@dataclass(frozen=True)
class Times:
    """Seconds per call of one entry, a number a round, and how often each stretch repeated it."""

    seconds: tuple[float, ...]
    repetitions: int


@dataclass(frozen=True)
class Summary:
    """Quantiles (QUANTILES) of seconds per call, and of the per-round ratios to the reference."""

    seconds: tuple[float, float, float]
    ratios: tuple[float, float, float]
    rounds: int
    repetitions: int


def thread_seconds(call: Call, repetitions: int) -> float:
    """CPU time of this thread: what others do on the machine does not count. For one thread only."""
    started = time.thread_time()
    for _ in range(repetitions):
        call()
    return (time.thread_time() - started) / repetitions


def wall_seconds(call: Call, repetitions: int) -> float:
    """Time on the wall, for several threads."""
    started = time.perf_counter()
    for _ in range(repetitions):
        call()
    return (time.perf_counter() - started) / repetitions


def cuda_seconds(call: Call, repetitions: int) -> float:
    """Time between CUDA events, the L2 cache flushed before each call, as triton.testing.do_bench does it."""
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(repetitions)] for _ in range(2)]
    for started, ended in zip(*events, strict=True):
        flushed.zero_()
        started.record()
        call()
        ended.record()
    torch.cuda.synchronize()
    return sum(a.elapsed_time(b) for a, b in zip(*events, strict=True)) / repetitions / 1e3


CLOCKS: dict[str, Clock] = {
    "thread_time": thread_seconds,
    "perf_counter": wall_seconds,
    "cuda_event": cuda_seconds,
}


def clock_name(device: str, threads: int) -> str:
    """The key of CLOCKS for this device and so many threads."""
    if device == "cuda":
        return "cuda_event"
    return "thread_time" if threads == 1 else "perf_counter"


def interleave(calls: Mapping[str, Call], clock: Clock, rounds: int, budget_seconds: float) -> dict[str, Times]:
    """Time each call once a round; each round begins with another of them.

    Args:
        calls: by name. Each is called a few times before it counts, to learn how often a stretch repeats it.
        clock: a value of CLOCKS.
        rounds: at most so many, and at least min(rounds, MIN_ROUNDS).
        budget_seconds: no further round once so much time on the wall has gone by.
    """
    once = {name: _seconds_once(call, clock) for name, call in calls.items()}
    repetitions = {name: _repetitions(taken) for name, taken in once.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        deadline = time.perf_counter() + budget_seconds
        for turn in count():
            if turn >= rounds or (turn >= MIN_ROUNDS and time.perf_counter() > deadline):
                break
            first = turn % len(names) if names else 0
            for name in names[first:] + names[:first]:
                if once[name] < LONG_SECONDS:
                    calls[name]()
                seconds[name].append(clock(calls[name], repetitions[name]))
    finally:
        if collects:
            gc.enable()
    return {name: Times(tuple(seconds[name]), repetitions[name]) for name in names}


def summarize(times: Mapping[str, Times], reference: str) -> dict[str, Summary]:
    """Quantiles of each entry's times, and of its ratio to the reference in the same round."""
    base = numpy.array(times[reference].seconds)
    return {
        name: Summary(
            _quantiles(numpy.array(entry.seconds)),
            _quantiles(numpy.array(entry.seconds) / base),
            len(entry.seconds),
            entry.repetitions,
        )
        for name, entry in times.items()
    }


def _quantiles(values: numpy.ndarray) -> tuple[float, float, float]:
    low, median, high = (float(value) for value in numpy.quantile(values, QUANTILES))
    return low, median, high


def _seconds_once(call: Call, clock: Clock) -> float:
    call()
    taken = clock(call, 1)
    return taken if taken >= LONG_SECONDS else clock(call, 1)


def _repetitions(seconds_once: float) -> int:
    wanted = SHORTEST_SECONDS / max(seconds_once, 1e-9)
    return min(_MOST_REPETITIONS, max(1, round(wanted)))
