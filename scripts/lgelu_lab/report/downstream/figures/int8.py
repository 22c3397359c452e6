"""Latency of every network in float32 and int8, with the score beside it."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.figures.panels import draw_panels
from lgelu_lab.report.downstream.measurements import Row, label_of, of_measurement, rows_by, values_of
from lgelu_lab.report.downstream.tables.int8 import INT8, PRECISIONS, batch_sizes
from lgelu_lab.report.figures.drawing import Drawing, style
from lgelu_lab.report.numbers import digits_of, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"float32": "#8c959f", "int8-layers": "#56B4E9", INT8: "#0072B2"}
_Y = {"float32": 0.27, "int8-layers": 0.0, INT8: -0.27}


def draw_int8(measurements: Sequence[MeasurementRecord]) -> Drawing | None:
    """A panel per benchmark, at its largest batch; None where nothing was measured."""
    found = of_measurement(measurements, "int8")
    if not found:
        return None
    figure = draw_panels(found, _draw_panel, height=3.4, legend={PRECISIONS[name]: c for name, c in _COLOURS.items()})
    return Drawing(
        "downstream-int8",
        "Latency and score in float32 and int8",
        "Time of one call of onnxruntime at the largest batch measured, on one thread: bars are the median over the "
        "rounds, thin lines the quartiles, numbers the score. Mean over seeds. Shorter is better.",
        figure,
    )


def _draw_panel(axis: "Axes", benchmark: str, records: Sequence[MeasurementRecord]) -> None:
    size = batch_sizes(records)[-1]
    groups = {
        (model, precision): rows
        for (model, precision, batch), rows in rows_by(records, "model", "precision", "batch_size").items()
        if batch == size
    }
    models = list(dict.fromkeys(model for model, _ in groups))
    for (model, precision), rows in groups.items():
        _draw_bar(axis, len(models) - 1 - models.index(model), precision, rows)
    style(axis, title=benchmark, x=f"ms per batch of {size}")
    axis.grid(visible=False, axis="y")
    axis.set_yticks(range(len(models)), [label_of(model) for model in reversed(models)])
    axis.set_xlim(0, 1.3 * max(_mean(rows, "quartile3_ms") for rows in groups.values()))


def _draw_bar(axis: "Axes", place: int, precision: str, rows: Sequence[Row]) -> None:
    height, median = place + _Y[precision], _mean(rows, "median_ms")
    low, high = _mean(rows, "quartile1_ms"), _mean(rows, "quartile3_ms")
    axis.barh(height, median, height=0.25, color=_COLOURS[precision])
    axis.plot([low, high], [height] * 2, color="black", linewidth=1)
    text = number(_mean(rows, "score"), digits_of(rows[0]["metric"]))
    axis.annotate(text, (max(median, high), height), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)


def _mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(values_of(rows, key))
