"""A panel per benchmark, in as many rows as it takes, and one legend below them all."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.figures.networks import colour_of
from lgelu_lab.report.downstream.measurements import MODEL_LABELS, label_of
from lgelu_lab.report.figures.drawing import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_IN_A_ROW = 2
_WIDTH = 4.0


def draw_panels(
    found: Mapping[str, Sequence[MeasurementRecord]],
    draw: Callable[["Axes", str, Sequence[MeasurementRecord]], None],
    *,
    height: float,
    legend: Mapping[str, str],
) -> "Figure":
    """One panel by `draw` for each benchmark of `found`.

    Args:
        found: {benchmark: its records}.
        draw: axis, benchmark, its records → the panel.
        height: of a panel, in inches.
        legend: {text: colour}.
    """
    from matplotlib.patches import Patch

    columns = min(_IN_A_ROW, len(found))
    lines = -(-len(found) // columns)
    figure = new_figure(1.2 + _WIDTH * columns, 0.6 + height * lines)
    figure.get_layout_engine().set(hspace=0.08, wspace=0.05)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, (benchmark, records) in zip(axes, found.items(), strict=False):
        draw(axis, benchmark, records)
    for axis in axes[len(found) :]:
        axis.set_visible(False)
    handles = [Patch(color=colour, label=text) for text, colour in legend.items()]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 2 * columns), frameon=False, fontsize=10
    )
    return figure


def models_legend(found: Mapping[str, Sequence[MeasurementRecord]]) -> dict[str, str]:
    """{network's name in the tables: its colour} of those that have a row."""
    there = {row["model"] for records in found.values() for record in records for row in record.rows}
    known = [model for model in MODEL_LABELS if model in there]
    return {label_of(model): colour_of(model) for model in [*known, *sorted(there - set(known))]}
