"""Means and deviations of scores in a panel, and an axis that leaves out what is far away but says so."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lgelu_lab.report.downstream.measurements import Row, values_of
from lgelu_lab.report.figures.drawing import GREY
from lgelu_lab.report.numbers import digits_of, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARGIN = 0.15  # of the range, above and below


def mean_and_spread(rows: Sequence[Row]) -> tuple[float, float] | None:
    """(mean, sample standard deviation; zero for one seed) of the scores; None where some network is not there."""
    scores = values_of(rows, "score")
    if not scores or any(score is None for score in scores):
        return None
    return statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else 0.0


def set_limits(axis: "Axes", shown: Iterable[tuple[float, float]], others: Mapping[str, float], metric: str) -> None:
    """A score axis around `shown`, (mean, deviation) each; `others` {what: score} beyond it are written at the edge.

    One that is not farther away than the range of `shown` is taken in.
    """
    shown = list(shown)
    low, high = min(mean - spread for mean, spread in shown), max(mean + spread for mean, spread in shown)
    reach = max(high - low, 1e-3 * abs(high))
    near = [score for score in others.values() if low - reach <= score <= high + reach]
    low, high = min([low, *near]), max([high, *near])
    margin = _MARGIN * max(high - low, reach)
    axis.set_ylim(low - margin, high + margin)
    far = {what: score for what, score in others.items() if not low <= score <= high}
    for above, height, alignment in ((True, 0.985, "top"), (False, 0.015, "bottom")):
        lines = [
            f"{what} {number(score, digits_of(metric))} {'↑' if above else '↓'}"
            for what, score in far.items()
            if (score > high) == above
        ]
        if lines:
            axis.text(
                0.985, height, "\n".join(lines), transform=axis.transAxes, ha="right", va=alignment, fontsize=9,
                color=GREY, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )  # fmt: skip
