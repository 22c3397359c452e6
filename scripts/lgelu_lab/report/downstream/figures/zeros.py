"""Share of outputs that are zero or less, layer by layer."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.figures.networks import colour_of
from lgelu_lab.report.downstream.figures.panels import draw_panels, models_legend
from lgelu_lab.report.downstream.measurements import of_measurement, rows_by, values_of
from lgelu_lab.report.figures.drawing import Drawing, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_zeros(measurements: Sequence[MeasurementRecord]) -> Drawing | None:
    """A panel per benchmark; None where nothing was measured."""
    found = of_measurement(measurements, "zeros")
    if not found:
        return None
    figure = draw_panels(found, _draw_panel, height=3.0, legend=models_legend(found))
    return Drawing(
        "downstream-zeros",
        "Outputs of the activations that are not positive, per layer",
        "Of ReLU networks (solid, filled marks) these are exact zeros; of smooth ones (dashed, hollow marks) small "
        "negative numbers. Mean over units, training rows and seeds; layers from input to output.",
        figure,
    )


def _draw_panel(axis: "Axes", benchmark: str, records: Sequence[MeasurementRecord]) -> None:
    from matplotlib.ticker import MaxNLocator

    layers: dict[str, list[tuple[float, bool]]] = {}
    for (model, _), rows in rows_by(records, "model", "layer").items():
        share = 100 * statistics.fmean(values_of(rows, "off_fraction"))
        layers.setdefault(model, []).append((share, rows[0]["gate"] == "relu"))
    for model, points in layers.items():
        shares, exact = [share for share, _ in points], points[0][1]
        look = {"linestyle": "-" if exact else (0, (4, 2)), "markerfacecolor": colour_of(model) if exact else "white"}
        places = range(1, len(shares) + 1)
        axis.plot(places, shares, color=colour_of(model), marker="o", markersize=4.5, linewidth=1.6, **look)
    style(axis, title=benchmark, x="layer", y="outputs ≤ 0, %")
    axis.set_ylim(0, 100)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
