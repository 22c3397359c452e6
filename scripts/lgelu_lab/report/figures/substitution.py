"""The score before and after ReLU takes the gates' place, a line per seed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lgelu_lab.report.configurations import grouped, is_grid, is_relufied, of_benchmark
from lgelu_lab.report.figures.drawing import AS_IS, SUBSTITUTED, Drawing, new_figure, style, write_missing
from lgelu_lab.report.numbers import metric_with_direction
from lgelu_lab.report.substitution import SubstitutionScores, evaluation
from lgelu_lab.report.tables.substitution import SUBSTITUTION_LABELS
from lgelu_lab.studies.experiments import STUDIES
from lgelu_lab.studies.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANELS = {"best": "best epoch as trained (the paper's choice)", "last": "last epoch"}
_LOG_FROM = 3.0  # times the best score, in a metric without an upper end


def draw_substitution(records: Sequence[RunRecord], benchmark: str) -> Drawing | None:
    """Two panels, at the best and at the last epoch; None where nothing was substituted."""
    groups = of_benchmark(grouped(record for record in records if not is_grid(record)), benchmark)
    found = {
        label: seeds
        for label, seeds in groups.items()
        if seeds[0].config["activation"] in ("gelu", "lambda_gelu") and evaluation(seeds[0], "last")
    }
    if not found:
        return None
    missing = [
        label for label in SUBSTITUTION_LABELS if label not in found and benchmark in STUDIES["substitution"].benchmarks
    ]
    rows = [*found.items(), *((label, []) for label in missing)]
    figure = new_figure(9.0, 1.5 + 0.62 * len(rows))
    axes = figure.subplots(1, 2, sharey=True, sharex=True)
    first = next(iter(found.values()))[0]
    metric = metric_with_direction(first.metric, first.greater_is_better)
    for axis, (at, title) in zip(axes, _PANELS.items(), strict=True):
        _draw_rows(axis, rows, at)
        style(axis, title=title, x=metric)
        axis.grid(visible=False, axis="y")
    _spread_ticks(axes[0], found)
    scores = [evaluation(record, at) for seeds in found.values() for record in seeds for at in _PANELS]
    early = any(score is not None and score.early for score in scores)
    axes[0].set_yticks(range(len(rows)), [_two_lines(label) for label, _ in reversed(rows)])
    axes[0].set_ylim(-0.6, len(rows) - 0.4)
    figure.suptitle(f"{benchmark}: {metric}, before and after ReLU takes the gates' place", fontsize=11.5)
    figure.legend(
        handles=_handles(early), loc="outside lower center", ncols=2 if early else 3, frameon=False, fontsize=10
    )
    return Drawing(
        f"substitution-{benchmark}",
        f"Before and after substitution, {benchmark}",
        "A line per seed, from the network as trained to the same weights with ReLU at every gate. The network with "
        "ReLU swapped in during training is a ReLU network from then on and has one mark; two, where its best epoch "
        f"lies before the switch. {'Further right' if first.greater_is_better else 'Further left'} is better.",
        figure,
    )


def _draw_rows(axis: "Axes", rows: Sequence[tuple[str, list[RunRecord]]], at: str) -> None:
    for height, (_, seeds) in enumerate(reversed(rows)):
        if not seeds:
            write_missing(axis, height)
        for number, record in enumerate(seeds):
            score = evaluation(record, at)
            if score is None:
                continue
            level = height + 0.55 * ((len(seeds) - 1) / 2 - number) / len(seeds)
            axis.plot((score.as_is, score.relu), (level, level), color="0.6", linewidth=1.5, zorder=1)
            if not score.is_relu:
                axis.plot(score.as_is, level, "o", color=AS_IS, markersize=7, markerfacecolor=_face(score, AS_IS))
            own = is_relufied(record) and score.is_relu
            look = {"color": SUBSTITUTED, "markerfacecolor": _face(score, SUBSTITUTED)}
            axis.plot(score.relu, level, "s" if own else "D", markersize=5 if own else 4.5, **look)


def _face(score: SubstitutionScores, colour: str) -> str:
    return "white" if score.early else colour


def _handles(early: bool) -> list:
    from matplotlib.lines import Line2D

    marks = (
        ("o", AS_IS, "as trained"),
        ("D", SUBSTITUTED, "ReLU substituted, same weights"),
        ("s", SUBSTITUTED, "trained on with ReLU"),
    )
    handles = [Line2D([], [], marker=m, color=c, linestyle=" ", markersize=6, label=label) for m, c, label in marks]
    hollow = {"marker": "o", "markerfacecolor": "white", "color": AS_IS, "linestyle": " ", "markersize": 6}
    return [*handles, *[Line2D([], [], label="hollow: gates not hard, or ReLU not in yet", **hollow)] * early]


def _spread_ticks(axis: "Axes", found: dict[str, list[RunRecord]]) -> None:
    """Few ticks, and a logarithmic axis where a lower-is-better score goes up several times."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    scores = [evaluation(record, at) for seeds in found.values() for record in seeds for at in _PANELS]
    values = [value for score in scores if score for value in (score.as_is, score.relu)]
    lower_is_better = not next(iter(found.values()))[0].greater_is_better
    if lower_is_better and max(values) > _LOG_FROM * min(values):
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
    else:
        axis.xaxis.set_major_locator(MaxNLocator(nbins=4, prune="both"))


def _two_lines(label: str) -> str:
    return label.replace(", ", ",\n")
