"""λ over depth, a line per epoch, and over the epochs, a line per layer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lgelu_lab.report.configurations import of_benchmark
from lgelu_lab.report.correlation import hardness_path
from lgelu_lab.report.figures.drawing import Drawing, new_figure, seeds_in_words, style
from lgelu_lab.report.numbers import listed
from lgelu_lab.report.tables.profiles import LEARNED_LABELS, profile_groups
from lgelu_lab.studies.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MeanPath = dict[float, list[float]]
"""{epoch: λ of every layer, mean over seeds}."""


def draw_hardness(records: Sequence[RunRecord], benchmark: str) -> Drawing | None:
    """A column per init mode as learned; None where no such run is there."""
    groups = of_benchmark(profile_groups(records), benchmark)
    found = {label: groups[label] for label in LEARNED_LABELS if label in groups}
    if not found:
        return None
    paths = {label: mean_path(seeds) for label, seeds in found.items()}
    figure = new_figure(1.4 + 2.6 * len(found), 6.2)
    axes = figure.subplots(2, len(found), squeeze=False, sharey=True)
    last = max(max(path) for path in paths.values())
    layers = max(len(row) for path in paths.values() for row in path.values())
    for column, (label, path) in enumerate(paths.items()):
        _draw_over_depth(axes[0, column], path, last)
        _draw_over_epochs(axes[1, column], path, layers)
        y = "" if column else "hardness λ (log scale)"
        style(axes[0, column], title=label, x="layer, input to output", y=y)
        style(axes[1, column], x="epoch", y=y)
        _log_ticks(axes[0, column])
    seeds = seeds_in_words([len(seeds) for seeds in found.values()])
    figure.suptitle(f"{benchmark}: learned hardness of every layer, mean of {seeds}", fontsize=11.5)
    _bar(figure, axes[0, :], "viridis", (0, last), "epoch")
    _bar(figure, axes[1, :], "plasma", (1, layers), "layer")
    missing = [label for label in LEARNED_LABELS if label not in found]
    return Drawing(
        f"hardness-{benchmark}",
        f"Hardness over depth and epochs, {benchmark}",
        "Above, λ over depth: a line per epoch, from dark (before training) to light (last). Below, the same λ over "
        "the epochs: a line per layer, from dark (next to the input) to light (next to the output). Mean over seeds; "
        "λ = 1 is GELU.",
        figure,
        f"Missing: {listed(missing)}." if missing else "",
    )


def mean_path(seeds: Sequence[RunRecord]) -> MeanPath:
    """λ of every layer in the epochs that all seeds have, from 0 (before training) on; mean over the seeds."""
    paths = [hardness_path(record) for record in seeds]
    epochs = sorted(set.intersection(*map(set, paths)))
    return {
        epoch: [sum(values) / len(values) for values in zip(*(path[epoch] for path in paths), strict=True)]
        for epoch in epochs
    }


def _draw_over_depth(axis: "Axes", path: MeanPath, last: float) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    for epoch, values in path.items():
        layers = range(1, len(values) + 1)
        end = epoch in (0, max(path))
        look = {"linewidth": 2.4, "marker": "o", "markersize": 3.5, "zorder": 3} if end else {"linewidth": 1}
        axis.plot(layers, values, color=colormaps["viridis"](_shade(epoch / last)), **look)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _draw_over_epochs(axis: "Axes", path: MeanPath, layers: int) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    for depth, values in enumerate(zip(*path.values(), strict=True)):
        axis.plot(path.keys(), values, color=colormaps["plasma"](_shade(depth / max(1, layers - 1))), linewidth=1.6)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _shade(share: float) -> float:
    """The brightest colours of a map are lost on white."""
    return 0.9 * share


def _log_ticks(axis: "Axes") -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    near = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0) if high / low < 6 else (1.0, 2.0, 5.0)
    axis.yaxis.set_major_locator(LogLocator(subs=near))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter("")


def _bar(figure: object, axes: object, colours: str, ends: tuple[float, float], label: str) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    shown = LinearSegmentedColormap.from_list(colours, [colormaps[colours](_shade(i / 255)) for i in range(256)])
    mappable = ScalarMappable(Normalize(*ends), shown)
    bar = figure.colorbar(mappable, ax=list(axes), label=label, aspect=22, pad=0.02)
    bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    bar.ax.tick_params(labelsize=10)
