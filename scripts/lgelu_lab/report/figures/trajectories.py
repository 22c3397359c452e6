"""Validation score per epoch, and below it the rank correlation between the init modes' hardness profiles."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lgelu_lab.report.configurations import of_benchmark
from lgelu_lab.report.figures.drawing import COLOURS, DASHES, GREY, Drawing, new_figure, seeds_in_words, style
from lgelu_lab.report.numbers import listed, metric_with_direction
from lgelu_lab.report.tables.correlation import correlation_curves
from lgelu_lab.report.tables.profiles import PROFILE_LABELS, profile_groups
from lgelu_lab.studies.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lgelu_lab.report.correlation import CorrelationCurve

_ZOOMED_FROM = 8  # epochs; a shorter run is read in one piece
_PAIR_COLOURS = ("#CC79A7", "#0072B2", "#7A5C00")
_PAIR_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)))


def draw_trajectories(records: Sequence[RunRecord], benchmark: str) -> Drawing | None:
    """Score of GELU, ReLU and λ-GELU over the epochs, its second half enlarged, and ρ_S; None without such runs."""
    groups = profile_groups(records)
    found = {label: seeds for label, seeds in of_benchmark(groups, benchmark).items() if label in PROFILE_LABELS}
    if not found:
        return None
    curves = correlation_curves(groups, benchmark)
    first = next(iter(found.values()))[0]
    zoomed = max(len(record.epochs) for seeds in found.values() for record in seeds) >= _ZOOMED_FROM
    panels = ["all", *["zoom"] * zoomed, *["correlation"] * bool(curves)]
    figure = new_figure(7.6, 0.5 + sum({"all": 2.9, "zoom": 2.9, "correlation": 2.5}[panel] for panel in panels))
    axes = dict(zip(panels, figure.subplots(len(panels), 1, squeeze=False)[:, 0], strict=True))
    metric = metric_with_direction(first.metric, first.greater_is_better)
    last = max(record.last.epoch for seeds in found.values() for record in seeds)
    _draw_scores(axes["all"], found)
    axes["all"].set_xlim(0, last * 1.01)
    seeds = seeds_in_words([len(seeds) for seeds in found.values()])
    style(axes["all"], title=f"{benchmark}: validation score, {seeds}", x="epoch", y=metric)
    if zoomed:
        _draw_scores(axes["zoom"], found)
        _zoom(axes["zoom"], found, last)
        style(axes["zoom"], title="The same, second half of training", x="epoch", y=metric)
    if curves:
        _draw_correlations(axes["correlation"], curves)
        axes["correlation"].set_xlim(0, last * 1.01)
    missing = [label for label in PROFILE_LABELS if label not in found]
    handles = _legend(axes["all"], missing)
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=10)
    return Drawing(
        f"trajectories-{benchmark}",
        f"Validation score and Spearman correlation, {benchmark}",
        _caption(bool(curves)),
        figure,
        f"Missing: {listed(missing)}." if missing else "",
    )


def _draw_scores(axis: "Axes", found: dict[str, list[RunRecord]]) -> None:
    for label, seeds in found.items():
        # Where two lines run together, the dashed one is on top and both are seen.
        look = {"color": COLOURS[label], "linestyle": DASHES.get(label, "-"), "zorder": 4 if label in DASHES else 3}
        for record in seeds if len(seeds) > 1 else ():
            axis.plot(*_path(record), linewidth=0.8, alpha=0.3, color=look["color"])
        epochs, mean = _mean_path(seeds)
        axis.plot(epochs, mean, linewidth=2, label=label, marker="o" if len(epochs) < 3 else None, **look)


def _path(record: RunRecord) -> tuple[list[float], list[float]]:
    return [epoch.epoch for epoch in record.epochs], [epoch.score for epoch in record.epochs]


def _mean_path(seeds: Sequence[RunRecord]) -> tuple[list[float], list[float]]:
    """Mean over seeds, in the epochs that all of them have."""
    scores = [dict(zip(*_path(record), strict=True)) for record in seeds]
    epochs = sorted(set.intersection(*map(set, scores)))
    return epochs, [math.fsum(path[epoch] for path in scores) / len(scores) for epoch in epochs]


def _zoom(axis: "Axes", found: dict[str, list[RunRecord]], last: float) -> None:
    """Show the second half of the epochs; single bad epochs of a seed may leave the picture, the means do not."""
    from matplotlib.ticker import MaxNLocator

    shown = [record.best.score for seeds in found.values() for record in seeds]
    for seeds in found.values():
        epochs, mean = _mean_path(seeds)
        shown += [score for epoch, score in zip(epochs, mean, strict=True) if epoch >= last / 2]
    room = 0.08 * (max(shown) - min(shown)) or 0.01
    axis.set_xlim(last / 2, last * 1.005)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylim(min(shown) - room, max(shown) + room)


def _draw_correlations(axis: "Axes", curves: "dict[tuple[str, str], CorrelationCurve]") -> None:
    undefined = False
    for (pair, curve), colour, dashes in zip(curves.items(), _PAIR_COLOURS, _PAIR_DASHES, strict=False):
        mean, low, high = ([math.nan if v is None else v for v in row] for row in (curve.mean, curve.low, curve.high))
        undefined |= any(map(math.isnan, mean))
        axis.fill_between(curve.epochs, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.plot(curve.epochs, mean, color=colour, linestyle=dashes, linewidth=2, label=" and ".join(pair))
    if undefined:
        axis.plot([], [], " ", label="gap: undefined, all λ equal")
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.set_ylim(-1.08, 1.08)
    style(axis, title="Do the layers come in the same order?", x="epoch", y="Spearman's ρ over layers")
    axis.legend(fontsize=9.5, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.24), ncols=2)


def _legend(axis: "Axes", missing: Sequence[str]) -> list:
    from matplotlib.lines import Line2D

    handles, _ = axis.get_legend_handles_labels()
    return handles + [Line2D([], [], linestyle=" ", label=f"{label}: missing") for label in missing]


def _caption(correlated: bool) -> str:
    text = "Thick lines are means over seeds, thin lines the seeds; the second half is enlarged where there is one."
    if correlated:
        text += (
            " Below, Spearman's ρ between the λ of the layers under two init modes: mean over seeds, with a band from "
            "the lowest to the highest. 1 means that the layers come in the same order of hardness. Where every layer "
            "has the same λ, as at a uniform start, ρ is undefined and the line has a gap; where they hardly differ "
            "yet, it ranks differences that mean little."
        )
    return text
