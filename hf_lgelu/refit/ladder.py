"""Up the rungs of EFFORTS: one after the other, each kept only where held-out inputs are nearer for it."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from torch import nn

from hf_lgelu.refit.dials import EFFORTS, Effort
from hf_lgelu.refit.processes import main_decides
from hf_lgelu.refit.report import StepTaken


@dataclass(frozen=True)
class Rung:
    """What a rung took and gave on the networks that it was tried on.

    `usual_time` is a multiple of the refit's time, `usual_gain` the share of the distance that it took away, in words.
    """

    usual_time: float
    usual_gain: str


RUNGS: dict[Effort, Rung] = {
    "refit": Rung(1.0, ""),
    "place": Rung(
        1.3, "from nothing to two thirds of the distance, and four fifths with twice the units (width_budget=2)"
    ),
    "blocks": Rung(2.5, "a tenth to a half of the distance"),
    "distill": Rung(4.0, "about a tenth of the distance"),
}


def next_rung(steps: Sequence[StepTaken], possible: Sequence[Effort]) -> tuple[Effort, float, str] | None:
    """The first possible rung above those taken, the seconds that it may take by what these took, and its usual gain.

    None at the top.

    >>> next_rung([StepTaken("refit", 0.1, True, 10.0)], ("refit", "place"))[:2]
    ('place', 13.0)
    """
    above = [effort for effort in possible if EFFORTS.index(effort) > max(EFFORTS.index(step.effort) for step in steps)]
    refit = [step.seconds / RUNGS[step.effort].usual_time for step in steps]
    if not above:
        return None
    rung = RUNGS[above[0]]
    return above[0], rung.usual_time * sum(refit) / len(refit), rung.usual_gain


Reached = TypeVar("Reached")


class Climb(NamedTuple, Generic[Reached]):
    """The best that was reached, and every rung that was tried, in order."""

    best: Reached
    steps: tuple[StepTaken, ...]


class Metric:
    """The caller's measure of a model, as a share of the original's score that is lost."""

    def __init__(self, measure: Callable[[nn.Module], float], original: nn.Module) -> None:
        """Higher is better. Raises TypeError or ValueError where the original's score is no finite number."""
        self._measure = measure
        self._original = self._score(original)
        if not math.isfinite(self._original):
            raise ValueError(f"metric must give a finite number, and gives {self._original} of the original model")

    def lost(self, model: nn.Module) -> float:
        """(original - score) / |original|, below 0 for a better one; infinite for a score that is none. Of processes
        the main one's."""
        score = self._score(model)
        if not math.isfinite(score):
            return math.inf
        return (self._original - score) / (abs(self._original) or 1.0)

    def _score(self, model: nn.Module) -> float:
        found = self._measure(model)
        try:
            score = float(found)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metric(model) must give a number, higher is better, got {found!r}") from error
        return main_decides(score)


class OutOfTimeError(Exception):
    """A rung was ended: another one has been reached, and there is no time left for more."""


def climb(
    efforts: Sequence[Effort],
    attempt: Callable[[Effort, Reached | None], Reached],
    distance: Callable[[Reached], float | None],
    *,
    nearer: Callable[[Reached, Reached], bool],
    lost: Callable[[Reached], float | None] = lambda found: None,
    tolerance: float | None = None,
    max_seconds: float | None = None,
) -> Climb[Reached]:
    """Try the rungs in turn, from the lowest, and keep the nearest.

    Args:
        efforts: the rungs.
        attempt: makes a rung's network; it is given the best one so far. OutOfTimeError ends a rung.
        distance: of a network to the original, on inputs that nothing was fitted on; None where there are none.
        nearer: whether a network is nearer to the original than the best one so far.
        lost: the share of the original's score that a network loses; where two lose as much, or without it, it is
            `nearer` that decides.
        tolerance: no further rung once the share lost, or without it the distance, is at most this.
        max_seconds: no further rung is begun after so long, nor one that makes all layers anew when less is left than
            the first one took.

    >>> reached = {"refit": 0.5, "place": 0.7}
    >>> climb(list(reached), lambda effort, best: reached[effort], lambda found: found, nearer=float.__lt__).best
    0.5
    """
    started = time.perf_counter()
    best: Reached | None = None
    kept: StepTaken | None = None
    steps: list[StepTaken] = []
    for effort in efforts:
        begun = time.perf_counter()
        if steps and max_seconds is not None:
            left, first = main_decides((max_seconds - (begun - started), steps[0].seconds))
            if left <= 0:
                break
            if effort != "distill" and first > left:
                continue
        try:
            found = attempt(effort, best)
        except OutOfTimeError:
            steps.append(StepTaken(effort, None, False, time.perf_counter() - begun))
            break
        reached, share = distance(found), lost(found)
        step = StepTaken(effort, reached, True, time.perf_counter() - begun, share)
        if best is None or kept is None or _loses_less(step, kept, partial(nearer, found, best)):
            best, kept = found, step
        steps.append(replace(step, is_kept=kept is step))
        if tolerance is not None and kept.gap is not None and kept.gap <= tolerance:
            break
    if best is None:
        raise ValueError("there is no rung to climb")
    return Climb(best, tuple(steps))


def _loses_less(step: StepTaken, kept: StepTaken, is_nearer: Callable[[], bool]) -> bool:
    if step.lost is None or kept.lost is None or step.lost == kept.lost:
        return is_nearer()
    return step.lost < kept.lost
