"""All benchmarks at a glance: how far each ReLU network lies from the smooth GELU network."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lgelu_lab.report.configurations import Groups, benchmarks_of, paired
from lgelu_lab.report.figures.drawing import GREY, Drawing, new_figure, style
from lgelu_lab.report.numbers import MISSING
from lgelu_lab.report.tables.glance import WAYS, glance_groups, relu_score, ways_of
from lgelu_lab.studies.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOOKS = {WAYS[0]: ("D", "#D55E00"), WAYS[1]: ("o", "#0072B2"), WAYS[2]: ("s", "#009E73"), WAYS[3]: ("^", "#E69F00")}


def draw_glance(records: Sequence[RunRecord]) -> Drawing | None:
    """A row per benchmark, a mark per way to a ReLU network; None where no benchmark has a GELU run to compare with."""
    groups = glance_groups(records)
    names = benchmarks_of(record for seeds in groups.values() for record in seeds)
    names = [name for name in names if (name, "GELU") in groups]
    if not names:
        return None
    kinds: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        gelu = groups[name, "GELU"][0]
        kinds.setdefault((gelu.metric, gelu.greater_is_better), []).append(name)
    figure = new_figure(8.0, 0.9 + 0.75 * len(names) + 0.65 * len(kinds))
    heights = [len(rows) + 0.3 for rows in kinds.values()]
    axes = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, ((metric, greater), rows) in zip(axes, kinds.items(), strict=True):
        for height, name in enumerate(reversed(rows)):
            _draw_row(axis, groups, name, height)
        axis.axvline(0, color="black", linewidth=1)
        style(axis, x=_unit(metric, greater))
        axis.grid(visible=False, axis="y")
        axis.set_yticks(range(len(rows)), list(reversed(rows)))
        axis.set_ylim(-0.6, len(rows) - 0.4)
    figure.suptitle("Distance of each ReLU network from the smooth GELU network, last epoch", fontsize=11.5)
    figure.legend(handles=_handles(), loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    return Drawing(
        "glance",
        "Four ways to a ReLU network, all benchmarks",
        "Each mark is the mean over seeds of the ReLU network's score minus that of the GELU run with the same seed "
        "and recipe, in the last epoch; the line reaches from the lowest to the highest seed. On the black line "
        "nothing was lost.",
        figure,
    )


def distances(groups: Groups, benchmark: str) -> dict[str, list[float]]:
    """{way: ReLU network − GELU, of every seed that both have}: points of 100, or per cent of GELU's perplexity.

    Runs of another recipe than the GELU run are no pair.
    """
    ways = ways_of(groups, benchmark)
    found: dict[str, list[float]] = {}
    for way, seeds in ways.items():
        scored = [(relu_score(run), smooth) for run, smooth in paired(seeds, ways[WAYS[0]])]
        found[way] = [
            100 * (score - smooth.last.score) / (1 if smooth.greater_is_better else smooth.last.score)
            for score, smooth in scored
            if score is not None
        ]
    return found


def _draw_row(axis: "Axes", groups: Groups, name: str, height: int) -> None:
    missing = []
    for place, (way, values) in enumerate(distances(groups, name).items()):
        if not values:
            missing.append(way)
            continue
        marker, colour = _LOOKS[way]
        level = height + 0.27 - 0.18 * place
        axis.plot((min(values), max(values)), (level, level), color=colour, linewidth=1.5, alpha=0.6)
        axis.plot(sum(values) / len(values), level, marker, color=colour, markersize=6.5)
    if missing:
        text = f"{MISSING}, or of another recipe: {', '.join(missing)}"
        axis.text(
            0.0, height - 0.46, text, transform=axis.get_yaxis_transform(), fontsize=9, color=GREY, style="italic"
        )


def _unit(metric: str, greater_is_better: bool) -> str:
    if greater_is_better:
        return f"{metric} minus GELU's, in points of 100 (further right is better)"
    return f"{metric} against GELU's, in per cent (further left is better)"


def _handles() -> list:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], marker=marker, color=colour, linestyle=" ", markersize=6.5, label=way)
        for way, (marker, colour) in _LOOKS.items()
    ]
