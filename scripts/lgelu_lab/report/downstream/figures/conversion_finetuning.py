"""Score over the training steps around the swap, by what they begin with."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.figures.conversion import REFIT_COLOUR
from lgelu_lab.report.downstream.figures.networks import COLOURS
from lgelu_lab.report.downstream.figures.panels import draw_panels
from lgelu_lab.report.downstream.figures.scores import mean_and_spread, set_limits
from lgelu_lab.report.downstream.measurements import of_measurement
from lgelu_lab.report.downstream.tables.conversion_finetuning import NAME, STARTS, runs_of
from lgelu_lab.report.figures.drawing import Drawing, style
from lgelu_lab.report.numbers import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"direct": "#999999", "refit": REFIT_COLOUR, "anneal": COLOURS["hardened_relu"], "gelu": COLOURS["gelu"]}
_DASHES = ("-", (0, (4, 2)), (0, (1, 1.2)))  # of the learning rates, the highest first
_FEW_STEPS = 10  # up to so many the swapped and annealed networks may still be far away
_APART = 0.08  # between the starts, in units of a step's place


def draw_finetuning(measurements: Sequence[MeasurementRecord]) -> Drawing | None:
    """A panel per benchmark; None where nothing was measured."""
    found = of_measurement(measurements, NAME)
    if not found:
        return None
    return Drawing(
        "downstream-conversion-finetuning",
        "Score over the training steps around the swap",
        "Every point is a run of its own. Solid and filled: the higher learning rate; dashed and hollow: the lower "
        "one. Bars are the sample standard deviation over seeds. What is far away with few steps leaves the panel; its "
        "score without a step is written at the edge. Accuracy is better above, perplexity below.",
        draw_panels(found, _draw_panel, height=3.6, legend={STARTS[name]: c for name, c in _COLOURS.items()}),
    )


def _draw_panel(axis: "Axes", benchmark: str, records: Sequence[MeasurementRecord]) -> None:
    runs = runs_of(records)
    metric = next(iter(runs.values()))[0]["metric"]
    places = {steps: place for place, steps in enumerate(sorted({steps for _, steps, _ in runs}))}
    rates = sorted({rate for _, _, rate in runs if rate is not None}, reverse=True)
    shown, others = [], {}
    for index, (start, colour) in enumerate(_COLOURS.items()):
        for line, rate in enumerate(rates or [None]):
            scores = {
                steps: score
                for (name, steps, tried), rows in runs.items()
                if name == start and tried in (rate, None) and (score := mean_and_spread(rows))
            }
            at = [places[steps] + _APART * (index - (len(_COLOURS) - 1) / 2) for steps in sorted(scores)]
            means, spreads = ([scores[steps][part] for steps in sorted(scores)] for part in (0, 1))
            axis.errorbar(
                at, means, spreads, color=colour, linestyle=_DASHES[line % len(_DASHES)], linewidth=1.5, marker="o",
                markersize=4.5, markerfacecolor="white" if line else colour, capsize=2, elinewidth=1,
            )  # fmt: skip
            for steps, score in scores.items():
                if start in ("refit", "gelu") or steps > _FEW_STEPS:
                    shown.append(score)
                elif steps == 0:
                    others["direct swap"] = score[0]
    axis.set_xticks(list(places.values()), [count(steps) for steps in places])
    style(axis, title=benchmark, x="training steps", y=str(metric))
    if shown:
        set_limits(axis, shown, others, metric)
