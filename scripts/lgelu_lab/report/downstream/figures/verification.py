"""Images proved, refuted and left open, a stacked bar per network and ε."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.figures.panels import draw_panels
from lgelu_lab.report.downstream.measurements import Row, label_of, of_measurement, rows_by, values_of
from lgelu_lab.report.figures.drawing import GREY, Drawing, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUTCOMES = {
    "proved": ("#0072B2", ("proved",)),
    "refuted": ("#E69F00", ("refuted",)),
    "left open": ("#c9ced4", ("timeout", "unknown", "unconfirmed")),
}
"""{outcome: its colour, the columns that count it}."""


def outcome_counts(rows: Sequence[Row]) -> dict[str, float]:
    """{outcome: images, mean over the seeds}."""
    return {
        outcome: statistics.fmean(sum(row[key] for key in keys) for row in rows)
        for outcome, (_, keys) in OUTCOMES.items()
    }


def draw_verification(measurements: Sequence[MeasurementRecord]) -> Drawing | None:
    """A panel per benchmark; None where nothing was asked."""
    found = of_measurement(measurements, "verification")
    if not found:
        return None
    lines = max(_lines(rows_by(records, "model", "epsilon")) for records in found.values())
    legend = {outcome: colour for outcome, (colour, _) in OUTCOMES.items()}
    figure = draw_panels(found, _draw_panel, height=0.9 + 0.3 * lines, legend=legend)
    return Drawing(
        "downstream-verification",
        "Images proved, refuted and left open",
        "Local robustness asked of Marabou for each ε, a share of the pixels' range: how many images it proves, "
        "refutes with a counterexample that torch confirms, or leaves open in the time given. Mean over seeds. The "
        "networks that it refuses to read are named.",
        figure,
    )


def _lines(rows: Mapping[tuple, Sequence[Row]]) -> float:
    return len(rows) + 1.2 * len({model for model, _ in rows})


def _draw_panel(axis: "Axes", benchmark: str, records: Sequence[MeasurementRecord]) -> None:
    rows = rows_by(records, "model", "epsilon")
    height, ticks, images = 0.0, {}, 1.0
    for model in dict.fromkeys(model for model, _ in rows):
        asked = {epsilon: seeds for (name, epsilon), seeds in rows.items() if name == model}
        refused = any(seeds[0]["refusal"] is not None for seeds in asked.values())
        title = f"{label_of(model)}: refused" if refused else label_of(model)
        colour = GREY if refused else "black"
        axis.text(0, height, f" {title}", fontsize=10, color=colour, va="center", style="italic" if refused else None)
        for epsilon, seeds in asked.items() if not refused else ():
            height -= 1
            ticks[height] = f"ε = {epsilon:g}"
            images = max(images, *values_of(seeds, "points"))
            _draw_bar(axis, height, outcome_counts(seeds))
        height -= 1.2
    axis.set_ylim(height + 0.5, 0.7)
    axis.set_xlim(0, 1.02 * images)
    style(axis, title=benchmark, x="images")
    axis.grid(visible=False, axis="y")
    axis.set_yticks(list(ticks), list(ticks.values()))
    axis.tick_params(axis="y", length=0)


def _draw_bar(axis: "Axes", height: float, counts: Mapping[str, float]) -> None:
    left = 0.0
    for outcome, (colour, _) in OUTCOMES.items():
        axis.barh(height, counts[outcome], left=left, height=0.75, color=colour)
        left += counts[outcome]
