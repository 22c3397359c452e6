"""Error of the linear model over the length of the step away from its input."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.figures.networks import colour_of
from lgelu_lab.report.downstream.figures.panels import draw_panels, models_legend
from lgelu_lab.report.downstream.measurements import of_measurement, rows_by, values_of
from lgelu_lab.report.figures.drawing import Drawing, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_linear_pieces(measurements: Sequence[MeasurementRecord]) -> Drawing | None:
    """A panel per benchmark; None where nothing was measured."""
    found = of_measurement(measurements, "linear_pieces")
    if not found:
        return None
    figure = draw_panels(found, _draw_panel, height=3.4, legend=models_legend(found))
    return Drawing(
        "downstream-linear-pieces",
        "Error of the linear model around an input",
        "Largest error over test rows, scores and seeds, in float64. Solid, filled marks: an exact piece, over the "
        "steps that stay in the row's region; a gap where none stays. Dashed, hollow marks: the first-order model of a "
        "smooth network, over all steps. Lower is better; both scales are logarithmic.",
        figure,
    )


def _draw_panel(axis: "Axes", benchmark: str, records: Sequence[MeasurementRecord]) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    exact = {}
    for (model, step), rows in rows_by(records, "model", "perturbation").items():
        errors = [value for value in values_of(rows, "max_error_float64") if value is not None]
        lines.setdefault(model, []).append((step, max(errors) if errors else float("nan")))
        exact[model] = rows[0]["refusal"] is None
    for model, points in lines.items():
        look = {"linestyle": "-" if exact[model] else (0, (4, 2))}
        look["markerfacecolor"] = colour_of(model) if exact[model] else "white"
        steps, errors = zip(*sorted(points), strict=True)
        axis.plot(steps, errors, color=colour_of(model), marker="o", markersize=4.5, linewidth=1.6, **look)
    axis.set_xscale("log")
    axis.set_yscale("log")
    style(axis, title=benchmark, x="length of the step, L2", y="largest error, units of the scores")
