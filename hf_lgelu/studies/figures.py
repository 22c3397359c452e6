"""Records → figures. No torch; matplotlib is imported when a figure is drawn."""

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_lgelu.studies.records import RunRecord
from hf_lgelu.studies.report import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for colour-blind readers.
_AS_IS, _SUBSTITUTED = "#0072B2", "#D55E00"


def draw_hardness(records: Sequence[RunRecord], path: str | os.PathLike) -> None:
    """λ of every site over the epochs, mean over seeds: a row per benchmark, a panel per λ-GELU configuration."""
    groups = {key: seeds for key, seeds in grouped(records).items() if seeds[0].last.hardness}
    if not groups:
        raise ValueError("none of the records has a hardness to draw")
    benchmarks = list(dict.fromkeys(benchmark for benchmark, _ in groups))
    labels = list(dict.fromkeys(label for _, label in groups))
    figure = _figure(0.6 + 3.3 * len(labels), 0.4 + 3.2 * len(benchmarks))
    axes = figure.subplots(len(benchmarks), len(labels), squeeze=False)
    for row, benchmark in zip(axes, benchmarks, strict=True):
        for axis, label in zip(row, labels, strict=True):
            if (benchmark, label) not in groups:
                axis.axis("off")
                continue
            seeds = groups[benchmark, label]
            _draw_profile(axis, seeds)
            axis.set_title(f"{benchmark}, {len(seeds)} seeds\n{label}", fontsize=11)
        row[0].set_ylabel("hardness λ (log scale)")
    figure.savefig(path, dpi=160)


def draw_substitution(records: Sequence[RunRecord], path: str | os.PathLike) -> None:
    """The metric in the last epoch, as it is and with ReLU substituted: a row per configuration, a line per seed."""
    groups = {key: seeds for key, seeds in grouped(records).items() if seeds[0].last.relu_score is not None}
    if not groups:
        raise ValueError("none of the records has a substituted score to draw")
    benchmarks = list(dict.fromkeys(benchmark for benchmark, _ in groups))
    figure = _figure(7.0, 0.9 + 0.55 * len(groups) + 0.5 * len(benchmarks))
    heights = [sum(1 for benchmark, _ in groups if benchmark == name) for name in benchmarks]
    axes = figure.subplots(len(benchmarks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, name in zip(axes, benchmarks, strict=True):
        rows = [(label, seeds) for (benchmark, label), seeds in groups.items() if benchmark == name]
        _draw_rows(axis, rows)
        metric = rows[0][1][0].metric
        axis.set_title(f"{name}: {metric} in the last epoch, a line per seed", fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=160)


def _draw_profile(axis: "Axes", seeds: list[RunRecord]) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    sites = list(seeds[0].last.hardness)
    epochs = [0.0] + [epoch.epoch for epoch in seeds[0].epochs]
    for depth, site in enumerate(sites):
        paths = [
            [record.initial_hardness[site], *(epoch.hardness[site] for epoch in record.epochs)] for record in seeds
        ]
        mean = [sum(values) / len(values) for values in zip(*paths, strict=True)]
        shade = 0.05 + 0.85 * depth / max(1, len(sites) - 1)
        axis.plot(epochs, mean, color=colormaps["viridis"](shade), linewidth=2, label=f"{depth + 1}")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter("")
    axis.set_xlabel("epoch")
    axis.grid(alpha=0.3)
    axis.legend(title="layer", fontsize=9, frameon=False, ncols=1 + len(sites) // 7)


def _draw_rows(axis: "Axes", rows: list[tuple[str, list[RunRecord]]]) -> None:
    for height, (_, seeds) in enumerate(reversed(rows)):
        for number, record in enumerate(seeds):
            level = height + 0.5 * ((len(seeds) - 1) / 2 - number) / len(seeds)
            before, after = record.last.score, record.last.relu_score
            first = height == number == 0
            axis.plot((before, after), (level, level), color="0.6", linewidth=1.5, zorder=1)
            axis.plot(before, level, "o", color=_AS_IS, markersize=7, label="as trained" if first else None)
            axis.plot(
                after, level, "D", color=_SUBSTITUTED, markersize=4.5,
                label="ReLU substituted, same weights" if first else None,
            )  # fmt: skip
    axis.set_yticks(range(len(rows)), [label for label, _ in reversed(rows)])
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.grid(axis="x", alpha=0.3)


def _figure(width: float, height: float) -> "Figure":
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("drawing figures needs matplotlib: pip install 'hf-lgelu[benchmarks]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
