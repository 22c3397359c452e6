"""Hardening schedules: progress in [0, 1] → hardness. Pure functions of explicit time; no torch.

`start` may be a number or anything with arithmetic, such as a tensor of one λ per channel.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DEFAULT_SWITCH_FRACTION = 0.25
"""The paper's share of training in which λ is still learned."""


@dataclass(frozen=True)
class Schedule:
    """The shape of the way from λ(e_s) to the target: `interpolate(start, target, progress)`."""

    name: str
    description: str
    interpolate: Callable[[Any, float, float], Any]


def _linear(start: Any, target: float, progress: float) -> Any:
    return start + (target - start) * progress


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("linear", "equal steps in λ (the paper's Algorithm 1)", _linear),
        Schedule(
            "geometric",
            "equal factors of λ: the gate's width shrinks evenly in the logarithm",
            lambda start, target, progress: start * (target / start) ** progress,
        ),
        Schedule(
            "inverse",
            "equal steps in 1/λ, the gate's width",
            lambda start, target, progress: 1 / ((1 - progress) / start + progress / target),
        ),
        Schedule(
            "cosine",
            "slow at both ends of the way in λ",
            lambda start, target, progress: _linear(start, target, (1 - math.cos(math.pi * progress)) / 2),
        ),
    )
}


def check_schedule(schedule: str) -> Schedule:
    """Return the row of SCHEDULES, or raise naming the accepted ones."""
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; accepted: {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule]


def scheduled_hardness(schedule: str, start: Any, target: float, progress: float) -> Any:
    """λ at `progress` ∈ [0, 1] of the way from `start` to `target`; at 1 it is `target` exactly."""
    row = check_schedule(schedule)
    if not 0 <= progress <= 1:
        raise ValueError(f"progress must lie in [0, 1], got {progress}")
    if progress == 1:
        return start * 0 + target
    return row.interpolate(start, target, float(progress))


def switch_position(total: int, switch_fraction: float) -> int:
    """e_s = ⌊switch_fraction·T⌋: the last epoch (or step) in which λ is learned."""
    if not 0 <= switch_fraction < 1:
        raise ValueError(f"switch_fraction must lie in [0, 1), got {switch_fraction}")
    # 0.29 · 100 is 28.999999999999996 in floating point and means 29. The last epoch is always at the target.
    return min(math.floor(switch_fraction * total * (1 + 1e-12)), total - 1)


def hardening_progress(position: int, total: int, switch_fraction: float = DEFAULT_SWITCH_FRACTION) -> float | None:
    """(e − e_s)/(T − e_s) for the epoch (or step) number e = `position`, counted from 1 to T = `total`.

    None up to e_s, while λ is learned; 1 at e = T. The paper's Algorithm 1.
    Raises ValueError for a position outside training or a fraction outside [0, 1).

    >>> import hf_lgelu
    >>> [hf_lgelu.hardening_progress(epoch, 8) for epoch in range(1, 9)]
    [None, None, 0.16666666666666666, 0.3333333333333333, 0.5, 0.6666666666666666, 0.8333333333333334, 1.0]
    """
    if not 1 <= position <= total:
        raise ValueError(f"position must lie in [1, total], got position={position} and total={total}")
    switch = switch_position(total, switch_fraction)
    return None if position <= switch else (position - switch) / (total - switch)
