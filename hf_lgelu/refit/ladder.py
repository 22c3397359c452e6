"""How hard a conversion tries: one rung after the other, each kept only where held-out inputs are nearer for it.

| effort | what is changed |
|---|---|
| refit | the maps behind the gates, by ridge |
| place | before that, each ReLU's kink and slope, and in a wider network units that are always on |
| blocks | after that, layer by layer, both maps of each block, by Adam on the block's own inputs |
| distill | at last all blocks together, by Adam on the whole network's outputs |
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from hf_lgelu.refit.report import StepTaken

Effort = Literal["refit", "place", "blocks", "distill"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)

Reached = TypeVar("Reached")


@dataclass(frozen=True)
class Climb(Generic[Reached]):
    """The best that was reached, and every rung that was tried, in order."""

    best: Reached
    steps: tuple[StepTaken, ...]


def check_effort(effort: str | None, tolerance: float | None, max_seconds: float | None) -> Effort:
    """The highest rung that may be tried. Raises ValueError for what is none."""
    if effort is not None and effort not in EFFORTS:
        raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, got {effort!r}")
    for name, value in (("tolerance", tolerance), ("max_seconds", max_seconds)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise ValueError(f"{name} must be a number above 0, or None, got {value!r}")
    if effort is not None:
        return effort
    return EFFORTS[0] if tolerance is None else EFFORTS[-1]


def climb(
    efforts: Sequence[Effort],
    attempt: Callable[[Effort, Reached | None], Reached],
    distance: Callable[[Reached], float | None],
    *,
    tolerance: float | None = None,
    max_seconds: float | None = None,
) -> Climb[Reached]:
    """Try the rungs in turn, from the lowest, and keep the nearest.

    Args:
        efforts: the rungs.
        attempt: makes a rung's network; it is given the best one so far.
        distance: of a network to the original, on inputs that nothing was fitted on; None where there are none.
        tolerance: no further rung once the distance is at most this.
        max_seconds: no further rung is begun after so long.

    >>> climb(("refit", "place"), lambda effort, best: {"refit": 0.5, "place": 0.7}[effort], lambda found: found).best
    0.5
    """
    started = time.perf_counter()
    best: Reached | None = None
    least: float | None = None
    steps: list[StepTaken] = []
    for effort in efforts:
        begun = time.perf_counter()
        if steps and max_seconds is not None and begun - started > max_seconds:
            break
        found = attempt(effort, best)
        reached = distance(found)
        is_kept = not steps or (reached is not None and least is not None and reached < least)
        if is_kept:
            best, least = found, reached
        steps.append(StepTaken(effort, reached, is_kept, time.perf_counter() - begun))
        if tolerance is not None and least is not None and least <= tolerance:
            break
    if best is None:
        raise ValueError("there is no rung to climb")
    return Climb(best, tuple(steps))
