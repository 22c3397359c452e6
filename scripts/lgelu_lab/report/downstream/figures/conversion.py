"""Score of the refitted networks over the calibration rows, between the original and the direct swap."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.figures.networks import COLOURS
from lgelu_lab.report.downstream.figures.panels import draw_panels
from lgelu_lab.report.downstream.figures.scores import mean_and_spread, set_limits
from lgelu_lab.report.downstream.measurements import of_measurement, rows_by
from lgelu_lab.report.downstream.tables.conversion import METHODS, NAME
from lgelu_lab.report.figures.drawing import Drawing, style
from lgelu_lab.report.numbers import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFIT_COLOUR = "#D55E00"
_LINES = {
    "original": (COLOURS["gelu"], "-"),
    "hardened": (COLOURS["hardened_relu"], (0, (6, 2))),
    "bias-fold": ("#CC79A7", (0, (1, 1.2))),
    "direct": ("#999999", (0, (4, 2))),
}
_ALWAYS = ("original", "hardened")


def draw_conversion_scores(measurements: Sequence[MeasurementRecord]) -> Drawing | None:
    """A panel per benchmark; None where nothing was measured."""
    found = of_measurement(measurements, NAME)
    if not found:
        return None
    legend = {METHODS["refit"]: REFIT_COLOUR} | {METHODS[name]: colour for name, (colour, _) in _LINES.items()}
    return Drawing(
        "downstream-conversion",
        "Score of the refit over the calibration rows",
        "Points: the refit on so many unlabelled training rows, of text tokens; bars are the sample standard deviation "
        "over seeds, which is mostly that of the GELU networks: the table has the differences seed by seed. Lines, "
        "means over seeds: the GELU network (solid), the hardened network (long dashes), the bias fold on the most "
        "rows (dots) and the direct swap (dashes); what is too far away is written at the edge. Accuracy is better "
        "above, perplexity below.",
        draw_panels(found, _draw_panel, height=3.2, legend=legend),
    )


def _draw_panel(axis: "Axes", benchmark: str, records: Sequence[MeasurementRecord]) -> None:
    seeds = rows_by(records, "method", "rows")
    metric = next(iter(seeds.values()))[0]["metric"]
    ways = {key: mean_and_spread(rows) for key, rows in seeds.items()}
    refits = sorted((rows, score) for (method, rows), score in ways.items() if method == "refit" and score)
    lines = {method: score[0] for (method, _), score in ways.items() if method in _LINES and score}
    for method, height in lines.items():
        colour, dashes = _LINES[method]
        axis.axhline(height, color=colour, linestyle=dashes, linewidth=1.6)
    if refits:
        means, spreads = zip(*(score for _, score in refits), strict=True)
        look = {"color": REFIT_COLOUR, "marker": "o", "markersize": 5, "linewidth": 1.6, "capsize": 3}
        axis.errorbar(range(len(refits)), means, spreads, **look)
        axis.set_xticks(range(len(refits)), [count(rows) for rows, _ in refits])
    style(axis, title=benchmark, x=f"calibration {'tokens' if metric == 'perplexity' else 'rows'}", y=str(metric))
    shown = [*(score for _, score in refits), *((lines[method], 0.0) for method in _ALWAYS if method in lines)]
    others = {METHODS[method]: height for method, height in lines.items() if method not in _ALWAYS}
    set_limits(axis, shown, others, metric)
