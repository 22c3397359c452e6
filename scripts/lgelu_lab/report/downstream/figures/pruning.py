"""Score over the parameters that are left, by APoZ and by magnitude, before and after fine-tuning."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.figures.networks import colour_of
from lgelu_lab.report.downstream.figures.panels import draw_panels, models_legend
from lgelu_lab.report.downstream.measurements import Row, of_measurement, rows_by
from lgelu_lab.report.downstream.tables.pruning import parameters_left
from lgelu_lab.report.figures.drawing import Drawing, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKS = {"apoz": "o", "magnitude": "s"}

Point = tuple[float, float, float]
"""(parameters left in per cent, score pruned, score fine-tuned), means over the seeds."""


def draw_pruning(measurements: Sequence[MeasurementRecord]) -> Drawing | None:
    """A panel per benchmark; None where nothing was measured."""
    found = of_measurement(measurements, "pruning")
    if not found:
        return None
    figure = draw_panels(found, _draw_panel, height=3.8, legend=models_legend(found))
    return Drawing(
        "downstream-pruning",
        "Score over the parameters left",
        "Circles: units with the most zeros removed (APoZ); squares: those with the smallest weights (magnitude). "
        "Hollow and dashed before fine-tuning, filled and solid after it; crosses: only dead units removed, before "
        "fine-tuning. Mean over seeds.",
        figure,
    )


def pruned_points(rows: Mapping[tuple, Sequence[Row]], model: str, criterion: str) -> list[Point]:
    """One point per fraction that could be removed, the most parameters first.

    Args:
        rows: by model, criterion, rule and fraction.
        model: network.
        criterion: key of tables.pruning.CRITERIA.
    """
    points = []
    for (name, kind, rule, _), seeds in rows.items():
        done = [row for row in seeds if row["refusal"] is None]
        if name == model and kind == criterion and rule in ("fraction", None) and done:
            left = 100 * statistics.fmean(parameters_left(row) for row in done)
            points.append((left, *(statistics.fmean(row[key] for row in done) for key in _SCORES)))
    return sorted(points, reverse=True)


_SCORES = ("score_pruned", "score_finetuned")


def _draw_panel(axis: "Axes", benchmark: str, records: Sequence[MeasurementRecord]) -> None:
    rows = rows_by(records, "model", "criterion", "rule", "fraction")
    for model in dict.fromkeys(model for model, *_ in rows):
        for criterion, mark in _MARKS.items():
            points = pruned_points(rows, model, criterion)
            _draw_line(axis, points, mark, colour_of(model))
        for left, score, _ in pruned_points(rows, model, "dead"):
            axis.plot(left, score, "x", color=colour_of(model), markersize=8, markeredgewidth=2)
    metric = next(iter(rows.values()))[0]["metric"]
    style(axis, title=benchmark, x="parameters left, %", y=str(metric))
    axis.invert_xaxis()


def _draw_line(axis: "Axes", points: Sequence[Point], mark: str, colour: str) -> None:
    if not points:
        return
    left, pruned, finetuned = zip(*points, strict=True)
    look = {"marker": mark, "markersize": 5, "color": colour}
    axis.plot(left, finetuned, linewidth=1.6, **look)
    axis.plot(left, pruned, linewidth=1, linestyle=(0, (4, 2)), markerfacecolor="white", **look)
