"""Hardening schedules: progress in [0, 1] → hardness. Pure functions of explicit time; no torch.

`start` may be a number or anything with arithmetic, such as a tensor of one λ per channel.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

DEFAULT_SWITCH_FRACTION = 0.25
"""The paper's share of training in which λ is still learned."""


Schedule: TypeAlias = Callable[[Any, Any, float], Any]
"""(start, target, progress) → λ."""

SCHEDULES: dict[str, Schedule] = {
    # Equal steps in λ: the paper's Algorithm 1.
    "linear": lambda start, target, progress: start + (target - start) * progress,
    # Equal factors of λ: the gate's width shrinks evenly in the logarithm.
    "geometric": lambda start, target, progress: start * (target / start) ** progress,
    # Equal steps in 1/λ, the gate's width.
    "inverse": lambda start, target, progress: 1 / ((1 - progress) / start + progress / target),
    # Slow at both ends of the way in λ.
    "cosine": lambda start, target, progress: start + (target - start) * ((1 - math.cos(math.pi * progress)) / 2),
}
"""The shapes of the way from λ(e_s) to the target, one row each."""


def check_schedule(schedule: str) -> Schedule:
    """Return the row of SCHEDULES, or raise naming the accepted ones."""
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; accepted: {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule]


def scheduled_hardness(schedule: str, start: Any, target: float, progress: float) -> Any:
    """λ at `progress` ∈ [0, 1] of the way from `start` to `target`; at 1 it is `target` exactly."""
    on_the_way = check_schedule(schedule)
    if not 0 <= progress <= 1:
        raise ValueError(f"progress must lie in [0, 1], got {progress}")
    if progress == 1:
        return start * 0 + target
    return on_the_way(start, target, float(progress))


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
    >>> from hf_lgelu.models.schedules import hardening_progress
    >>> [hardening_progress(epoch, 8) for epoch in range(1, 9)]
    [None, None, 0.16666666666666666, 0.3333333333333333, 0.5, 0.6666666666666666, 0.8333333333333334, 1.0]
    """
    if not 1 <= position <= total:
        raise ValueError(f"position must lie in [1, total], got position={position} and total={total}")
    switch = switch_position(total, switch_fraction)
    return None if position <= switch else (position - switch) / (total - switch)
