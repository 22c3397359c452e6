"""Up the rungs of EFFORTS: one after the other, each kept only where held-out inputs are nearer for it.

The mean of the differences on the units held out decides, unless the network was chosen on these units: of
distillation the nearest of eight looks is taken, and the nearest of eight is nearer in the mean without any effect. So
the units are compared in pairs, and the mean of the differences has to be below zero by two of its standard errors.
With differences of -1 on m of n units and 0 on the others it is √(m(n - 1)/(n - m)) of them, 1 for one unit however far
it falls: above 2, at least four of nine or more have come nearer. Of 4,000 random walks without an effect (19 to 256
units, steps normal or with lognormal scales) the mean of the nearest look had fallen in 80 %, by one standard error in
34 to 40 %, by two in 4 to 8 %. A sign test is no help: where most units come a little nearer and a tenth moves far away
it says yes, and what is reported and bounded is the mean.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import nn

from hf_lgelu.refit.dials import EFFORTS, Effort
from hf_lgelu.refit.processes import main_decides
from hf_lgelu.refit.report import StepTaken

USUAL_TIME: dict[Effort, float] = {"refit": 1.0, "place": 1.3, "distill": 4.0}
"""What each rung took on the networks that it was tried on, as a multiple of the refit's time."""

CHOSEN_ON_THEM = 2.0
"""Standard errors for a network that was chosen on the units."""


def next_rung(steps: Sequence[StepTaken], possible: Sequence[Effort]) -> tuple[Effort, float] | None:
    """The first possible rung above those taken, and the seconds that it may take by what these took; None at the top.

    >>> next_rung([StepTaken("refit", 0.1, True, 10.0)], ("refit", "place"))
    ('place', 13.0)
    """
    above = [effort for effort in possible if EFFORTS.index(effort) > max(EFFORTS.index(step.effort) for step in steps)]
    refit = [step.seconds / USUAL_TIME[step.effort] for step in steps]
    if not above:
        return None
    return above[0], USUAL_TIME[above[0]] * sum(refit) / len(refit)


Reached = TypeVar("Reached")


class Climb(NamedTuple, Generic[Reached]):
    """The best that was reached, and every rung that was tried, in order."""

    best: Reached
    steps: tuple[StepTaken, ...]


class Metric:
    """The caller's measure of a model, as a share of the original's score that is lost."""

    def __init__(self, measure: Callable[[nn.Module], float], original: nn.Module) -> None:
        """Higher is better. Raises ValueError where the original's score is no finite number."""
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
        return main_decides(float(self._measure(model)))


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


def is_nearer(gaps: Sequence[float], than: Sequence[float], standard_errors: float = 0.0) -> bool:
    """Whether the mean difference is below zero, by more than so many of its standard errors.

    Any network whose outputs are finite is nearer than one whose outputs are not.

    Args:
        gaps: how far a network is from the original, a number a unit.
        than: how far another one is on the same units.
        standard_errors: 0 where the units had no part in making the network. Of one unit there is no error: above 0 it
            is never enough.

    >>> is_nearer([1.0, 1.1, 0.9, 1.0, 0.0], than=[1.0, 1.1, 0.9, 1.0, 99.0])
    True
    >>> is_nearer([1.0, 1.1, 0.9, 1.0, 0.0], than=[1.0, 1.1, 0.9, 1.0, 99.0], standard_errors=2)
    False
    """
    if not all(map(math.isfinite, than)):
        return all(map(math.isfinite, gaps))
    if not gaps or (standard_errors and len(gaps) == 1):
        return False
    changes = torch.tensor(gaps, dtype=torch.float64) - torch.tensor(than, dtype=torch.float64)
    margin = standard_errors * changes.std().item() / len(changes) ** 0.5 if standard_errors else 0.0
    return bool(changes.mean() < -margin)
