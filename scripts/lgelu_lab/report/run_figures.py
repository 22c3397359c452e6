"""The figures of the training runs, one specification each; matplotlib is imported when one is drawn."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from lgelu_lab.report.drawing import (
    DASHES,
    GREY,
    PALETTE,
    FigureSpec,
    new_figure,
    plain,
    seeds_in_words,
    style,
)
from lgelu_lab.report.frames import ReportData, mean_path, of_label
from lgelu_lab.report.numbers import (
    MISSING,
    digits_of,
    listed,
    metric_with_direction,
    number,
)
from lgelu_lab.report.run_tables import (
    EXPECTED_RUNS,
    LEARNED_LABELS,
    PROFILE_LABELS,
    correlation_curves,
    grid_cells,
    profile_runs,
)
from lgelu_lab.studies.experiments import STUDIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Drawn = "tuple[Figure, str, str] | None"


def _metric(seeds: pd.DataFrame) -> str:
    first = seeds.iloc[0]
    return metric_with_direction(first["metric"], bool(first["greater_is_better"]))


def _missing(wanted: "tuple[str, ...]", found: Mapping[str, object], benchmark: str) -> str:
    """The runs that the study of profiles has of the benchmark and that were not made."""
    if benchmark not in STUDIES["profiles"].benchmarks:
        return ""
    absent = [label for label in wanted if label not in found]
    return f"Missing: {listed(absent)}." if absent else ""


_ZOOMED_FROM = 8  # epochs; a shorter run is read in one piece
_PAIR_COLOURS = (PALETTE["ReLU"], PALETTE["hardened, swapped"], PALETTE["λ-GELU decreasing"])
_PAIR_DASHES = ("-", (0, (5, 1.5)), (0, (1, 1.2)))


def draw_trajectories(data: ReportData, benchmark: str) -> Drawn:
    """Score of GELU, ReLU and λ-GELU over the epochs, its second half enlarged, and ρ_S between the init modes."""
    runs = of_label(profile_runs(data), benchmark)
    found = {label: seeds for label, seeds in runs.items() if label in PROFILE_LABELS}
    if not found:
        return None
    paths = {label: _score_paths(data, seeds) for label, seeds in found.items()}
    curves = correlation_curves(data, benchmark)
    zoomed = max(len(path) for path in paths.values()) >= _ZOOMED_FROM
    panels = ["all", *["zoom"] * zoomed, *["correlation"] * bool(curves)]
    figure = new_figure(7.6, 0.7 + sum({"all": 2.9, "zoom": 2.9, "correlation": 2.7}[panel] for panel in panels))
    axes = dict(zip(panels, figure.subplots(len(panels), 1, squeeze=False)[:, 0], strict=True))
    metric, last = _metric(next(iter(found.values()))), max(path.index.max() for path in paths.values())
    for name, title in (("all", ""), ("zoom", "The same, second half of training")):
        if name in axes:
            _draw_scores(axes[name], paths)
            style(axes[name], title=title, x="epoch", y=metric)
    axes["all"].set_xlim(0, last * 1.01)
    if zoomed:
        _zoom(axes["zoom"], paths, last)
    seeds = seeds_in_words([list(seeds["seed"]) for seeds in found.values()])
    axes["all"].set_title(f"{plain(benchmark)}: validation score, {seeds}", fontsize=11, loc="left")
    handles, labels = axes["all"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=10)
    if curves:
        _draw_correlations(axes["correlation"], curves)
        axes["correlation"].set_xlim(0, last * 1.01)
    several = any(path.shape[1] > 1 for path in paths.values())
    return figure, _trajectory_caption(several, zoomed, curves), _missing(PROFILE_LABELS, found, benchmark)


def _trajectory_caption(several: bool, zoomed: bool, curves: Mapping) -> str:
    parts = ["Thick lines are means over seeds, thin lines the seeds." if several else "One seed a line."]
    parts += ["The second panel enlarges the second half."] * zoomed
    if curves:
        parts.append(
            "Below, Spearman's ρ between the λ of the layers under two init modes: mean over seeds, with a band from "
            "the lowest to the highest. 1 means that the layers come in the same order of hardness. Where every layer "
            "has the same λ, as at a uniform start, ρ is undefined and the line has a gap; where they hardly differ "
            "yet, it ranks differences that mean little."
        )
    return " ".join(parts)


def _score_paths(data: ReportData, seeds: pd.DataFrame) -> pd.DataFrame:
    """The score by epoch (rows) and run (columns)."""
    epochs = data.epochs[data.epochs["run"].isin(seeds.index)]
    return epochs.pivot(index="epoch", columns="run", values="score")


def _draw_scores(axis: "Axes", paths: Mapping[str, pd.DataFrame]) -> None:
    for label, path in paths.items():
        # Where two lines run together, the dashed one is on top and both are seen.
        look = {"color": PALETTE[label], "linestyle": DASHES.get(label, "-"), "zorder": 4 if label in DASHES else 3}
        if path.shape[1] > 1:
            axis.plot(path, linewidth=0.8, alpha=0.5, color=look["color"])
        mean = path.dropna().mean(axis=1)
        axis.plot(mean, linewidth=2, label=label, marker="o" if len(mean) < 3 else None, **look)


def _zoom(axis: "Axes", paths: Mapping[str, pd.DataFrame], last: float) -> None:
    """Show the second half of the epochs; single bad epochs of a seed may leave the picture, the means do not."""
    from matplotlib.ticker import MaxNLocator

    shown = [mean for path in paths.values() for mean in path.dropna().mean(axis=1).loc[last / 2 :]]
    room = 0.12 * (max(shown) - min(shown)) or 0.01
    axis.set_xlim(last / 2, last * 1.005)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylim(min(shown) - room, max(shown) + room)


def _draw_correlations(axis: "Axes", curves: Mapping[tuple[str, str], pd.DataFrame]) -> None:
    for (pair, curve), colour, dashes in zip(curves.items(), _PAIR_COLOURS, _PAIR_DASHES, strict=False):
        axis.fill_between(curve.index, curve.min(axis=1), curve.max(axis=1), color=colour, alpha=0.15, linewidth=0)
        axis.plot(curve.mean(axis=1), color=colour, linestyle=dashes, linewidth=2, label=" and ".join(pair))
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.set_ylim(-1.08, 1.08)
    style(axis, title="Do the layers come in the same order?", x="epoch", y="Spearman's ρ over layers")
    axis.legend(fontsize=9.5, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.24), ncols=2)


def draw_hardness(data: ReportData, benchmark: str) -> Drawn:
    """λ over depth, a line per epoch, and over the epochs, a line per layer; a column per init mode as learned."""
    runs = of_label(profile_runs(data), benchmark)
    found = {label: runs[label] for label in LEARNED_LABELS if label in runs}
    if not found:
        return None
    paths = {label: mean_path(seeds) for label, seeds in found.items()}
    figure = new_figure(max(5.2, 1.4 + 2.6 * len(found)), 6.4)
    axes = figure.subplots(2, len(found), squeeze=False, sharey=True)
    last, layers = max(path.index.max() for path in paths.values()), max(path.shape[1] for path in paths.values())
    for column, (label, path) in enumerate(paths.items()):
        _draw_layers(axes[0, column], path, last)
        _draw_layers(axes[1, column], path.T, layers - 1, "plasma")
        y = "" if column else "hardness λ (log scale)"
        style(axes[0, column], title=label, x="layer, input to output", y=y)
        style(axes[1, column], x="epoch", y=y)
        _log_ticks(axes[0, column])
    seeds = seeds_in_words([list(seeds["seed"]) for seeds in found.values()])
    mean_of = seeds if seeds.startswith("1 seed") else f"mean of {seeds}"
    figure.suptitle(f"{plain(benchmark)}: learned hardness of every layer,\n{mean_of}", fontsize=11.5)
    _bar(figure, axes[0, :], "viridis", (0, last), "epoch")
    _bar(figure, axes[1, :], "plasma", (1, layers), "layer")
    caption = (
        "Above, λ over depth: a line per epoch, from dark (before training) to light (last). Below, the same λ over "
        "the epochs: a line per layer, from dark (next to the input) to light (next to the output). λ = 1 is GELU."
    )
    return figure, caption, _missing(LEARNED_LABELS, found, benchmark)


def _draw_layers(axis: "Axes", path: pd.DataFrame, last: float, colours: str = "viridis") -> None:
    """A line per row of `path`: over its layers in "viridis", the first and last row thick, or over its epochs."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    for place, (index, values) in enumerate(path.iterrows()):
        over_depth = colours == "viridis"
        share = index / last if over_depth else place / max(1, last)
        ends = {"linewidth": 2.4, "marker": "o", "markersize": 3.5, "zorder": 3}
        look = ends if over_depth and place in (0, len(path) - 1) else {"linewidth": 1.2 if over_depth else 1.6}
        at = range(1, len(values) + 1) if over_depth else list(values.index)
        axis.plot(at, list(values), color=colormaps[colours](_SHADE * share), **look)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


_SHADE = 0.82  # the brightest colours of a map are lost on white


def _log_ticks(axis: "Axes") -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    near = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0) if high / low < 6 else (1.0, 2.0, 5.0)
    axis.yaxis.set_major_locator(LogLocator(subs=near))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter("")


def _bar(figure: "Figure", axes: object, colours: str, ends: tuple[float, float], label: str) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    shown = LinearSegmentedColormap.from_list(colours, [colormaps[colours](_SHADE * i / 255) for i in range(256)])
    bar = figure.colorbar(ScalarMappable(Normalize(*ends), shown), ax=list(axes), label=label, aspect=22, pad=0.02)
    bar.ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    bar.ax.tick_params(labelsize=10)


def draw_grid(data: ReportData, benchmark: str) -> Drawn:
    """Heatmap of the grid: colour Δλ(t, c), text ΔBVS(t, c); a cell without a run is hatched and says so."""
    cells = grid_cells(data, benchmark)
    if not cells:
        return None
    temperatures, multipliers = (sorted(set(values)) for values in zip(*cells, strict=True))
    figure = new_figure(2.2 + 1.35 * len(multipliers), 1.7 + 0.95 * len(temperatures))
    axis = figure.subplots()
    drifts = [cell["drift"].mean() for cell in cells.values() if len(cell)]
    low, high = min(drifts), max(drifts) if max(drifts) > min(drifts) else min(drifts) + 1
    for (t, c), cell in cells.items():
        _draw_cell(axis, cell, (multipliers.index(c), temperatures.index(t)), (low, high))
    axis.set_xlim(-0.5, len(multipliers) - 0.5)
    axis.set_ylim(len(temperatures) - 0.5, -0.5)
    axis.set_xticks(range(len(multipliers)), [f"{c:g}" for c in multipliers], fontsize=10.5)
    axis.set_yticks(range(len(temperatures)), [f"{t:g}" for t in temperatures], fontsize=10.5)
    axis.set_xlabel("learning-rate multiplier c", fontsize=10.5)
    axis.set_ylabel("temperature t", fontsize=10.5)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    metric = _metric(next(cell for cell in cells.values() if len(cell)))
    axis.set_title(
        f"{plain(benchmark)}: drift Δλ (colour) and\nbest {plain(metric)} minus GELU's (text)", fontsize=11, loc="left"
    )
    _drift_bar(figure, axis, low, high)
    caption = (
        f"Colour: drift Δλ(t, c), averaged over seeds and init modes. Text: best validation {metric} minus that of the "
        "GELU baseline with the same seed, averaged likewise."
    )
    if not all(map(len, cells.values())):
        caption += " Hatched cells have no run yet."
    if any(0 < len(cell) < EXPECTED_RUNS for cell in cells.values()):
        caption += f" A cell with fewer than {EXPECTED_RUNS} runs says how many."
    return figure, caption, ""


def _draw_cell(axis: "Axes", cell: pd.DataFrame, place: tuple[int, int], ends: tuple[float, float]) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    x, y = place
    corner = (x - 0.485, y - 0.485)
    if not len(cell):
        axis.add_patch(Rectangle(corner, 0.97, 0.97, facecolor="0.96", edgecolor="0.75", hatch="///", linewidth=0))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        axis.text(x, y, MISSING, ha="center", va="center", fontsize=10, color=GREY, style="italic", bbox=box)
        return
    colour = colormaps["cividis"]((cell["drift"].mean() - ends[0]) / (ends[1] - ends[0]))
    axis.add_patch(Rectangle(corner, 0.97, 0.97, facecolor=colour, linewidth=0))
    luminance = sum(w * part**2.2 for w, part in zip((0.2126, 0.7152, 0.0722), colour, strict=False))
    gain = cell["gain"].mean()
    text = "no baseline" if math.isnan(gain) else number(gain, digits_of(cell["metric"].iloc[0]), signed=True)
    text += f"\n{len(cell)} of {EXPECTED_RUNS} runs" if len(cell) < EXPECTED_RUNS else ""
    look = {"fontsize": 10.5, "color": "black" if luminance > 0.36 else "white", "linespacing": 1.25}
    axis.text(x, y, text, ha="center", va="center", **look)


def _drift_bar(figure: "Figure", axis: "Axes", low: float, high: float) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    bar = figure.colorbar(ScalarMappable(Normalize(low, high), "cividis"), ax=axis, pad=0.02)
    bar.set_label("drift Δλ", fontsize=10.5)
    bar.outline.set_visible(False)


FIGURES: dict[str, FigureSpec] = {
    "trajectories": FigureSpec("Validation score over the epochs, {}", draw_trajectories),
    "hardness": FigureSpec("Hardness over depth and epochs, {}", draw_hardness),
    "grid": FigureSpec("Temperature t and multiplier c, {}", draw_grid),
}
"""{key: how the figure is made}."""
