"""Best validation score beside other activations: a dot per seed, a bar at their mean."""

from collections.abc import Sequence

from lgelu_lab.report.configurations import of_benchmark
from lgelu_lab.report.figures.drawing import COLOURS, Drawing, new_figure, style, write_missing
from lgelu_lab.report.numbers import metric_with_direction
from lgelu_lab.report.tables.related import RELATED_LABELS, related_groups
from lgelu_lab.studies.experiments import STUDIES
from lgelu_lab.studies.records import RunRecord


def draw_related(records: Sequence[RunRecord], benchmark: str) -> Drawing | None:
    """A row per activation; None where none but GELU, ReLU and λ-GELU was trained."""
    from matplotlib.ticker import MaxNLocator

    found = of_benchmark(related_groups(records), benchmark)
    if not found:
        return None
    wanted = RELATED_LABELS if benchmark in STUDIES["related"].benchmarks else tuple(found)
    figure = new_figure(7.4, 1.1 + 0.42 * len(wanted))
    axis = figure.subplots()
    first = next(iter(found.values()))[0]
    for height, label in enumerate(reversed(wanted)):
        seeds = found.get(label, [])
        if not seeds:
            write_missing(axis, height)
            continue
        scores = [record.best.score for record in seeds]
        mean = sum(scores) / len(scores)
        axis.plot((mean, mean), (height - 0.32, height + 0.32), color=COLOURS[label], linewidth=3)
        axis.plot(scores, [height] * len(scores), "o", color=COLOURS[label], markersize=7, alpha=0.6, markeredgewidth=0)
    metric = metric_with_direction(first.metric, first.greater_is_better)
    style(axis, title=f"{benchmark}: best validation score, a dot per seed, a bar at their mean", x=metric)
    axis.grid(visible=False, axis="y")
    axis.set_yticks(range(len(wanted)), list(reversed(wanted)))
    axis.set_ylim(-0.6, len(wanted) - 0.4)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6))
    return Drawing(
        f"related-{benchmark}",
        f"Other activations, {benchmark}",
        "Best validation score of each run, a dot per seed; the bar is their mean. "
        f"{'Further right' if first.greater_is_better else 'Further left'} is better.",
        figure,
    )
