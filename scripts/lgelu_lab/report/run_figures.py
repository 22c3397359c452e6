"""The figures of the training runs, one specification each; matplotlib is imported when one is drawn."""

import pandas as pd

from lgelu_lab.report.drawing import DASHES, PALETTE, FigureSpec, new_figure, plain, style
from lgelu_lab.report.frames import ReportData, mean_path, of_label
from lgelu_lab.report.numbers import MISSING, digits_of, metric_with_direction, number, present
from lgelu_lab.report.run_tables import EXPECTED_RUNS, LEARNED_LABELS, PROFILE_LABELS, grid_cells, profile_runs

Drawn = "tuple[Figure, str] | None"


def _metric(seeds: pd.DataFrame) -> str:
    first = seeds.iloc[0]
    return metric_with_direction(first["metric"], bool(first["greater_is_better"]))


def draw_trajectories(data: ReportData, benchmark: str) -> Drawn:
    """Score of GELU, ReLU and λ-GELU over the epochs."""
    runs = of_label(profile_runs(data), benchmark)
    found = {label: seeds for label, seeds in runs.items() if label in PROFILE_LABELS}
    if not found:
        return None
    figure = new_figure(7.6, 3.9)
    axis = figure.subplots()
    for label, seeds in found.items():
        epochs = data.epochs[data.epochs["run"].isin(seeds.index)]
        path = epochs.pivot(index="epoch", columns="run", values="score")
        look = {"color": PALETTE[label], "linestyle": DASHES.get(label, "-")}
        axis.plot(path, linewidth=0.8, alpha=0.5, color=look["color"])
        axis.plot(path.dropna().mean(axis=1), linewidth=2, label=label, **look)
    style(axis, title=f"{benchmark}: validation score", x="epoch", y=_metric(next(iter(found.values()))))
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    return figure, "Thick lines are means over seeds, thin lines the seeds."


def draw_hardness(data: ReportData, benchmark: str) -> Drawn:
    """λ over depth, a line per epoch; a column per init mode as learned."""
    from matplotlib import colormaps

    runs = of_label(profile_runs(data), benchmark)
    found = {label: mean_path(runs[label]) for label in LEARNED_LABELS if label in runs}
    if not found:
        return None
    figure = new_figure(max(5.2, 1.4 + 2.6 * len(found)), 3.9)
    axes = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for axis, (label, path) in zip(axes, found.items(), strict=True):
        for epoch, values in path.iterrows():
            colour = colormaps["viridis"](0.82 * epoch / path.index.max())  # the brightest are lost on white
            axis.plot(range(1, len(values) + 1), list(values), color=colour)
        axis.set_yscale("log")
        style(axis, title=label, x="layer, input to output", y="" if axis is not axes[0] else "hardness λ")
    figure.suptitle(f"{plain(benchmark)}: learned hardness of every layer", fontsize=11.5)
    caption = (
        "λ over depth, mean over the seeds: a line per epoch, from dark (before training) to light (last). λ = 1 is "
        "GELU."
    )
    return figure, caption


def draw_grid(data: ReportData, benchmark: str) -> Drawn:
    """Heatmap of the grid: colour Δλ(t, c), text ΔBVS(t, c); a cell without a run says so."""
    cells = grid_cells(data, benchmark)
    if not cells:
        return None
    drifts = pd.Series({point: cell["drift"].mean() for point, cell in cells.items()}).unstack()
    figure = new_figure(2.2 + 1.35 * drifts.shape[1], 1.7 + 0.95 * drifts.shape[0])
    axis = figure.subplots()
    picture = axis.imshow(drifts, cmap="cividis", aspect="auto")
    middle = (drifts.min().min() + drifts.max().max()) / 2
    for (t, c), cell in cells.items():
        text = MISSING
        if len(cell):
            gain = present([cell["gain"].mean()])
            text = number(gain[0], digits_of(cell["metric"].iloc[0]), signed=True) if gain else "no baseline"
            text += f"\n{len(cell)} of {EXPECTED_RUNS} runs" if len(cell) < EXPECTED_RUNS else ""
        place = (drifts.columns.get_loc(c), drifts.index.get_loc(t))
        dark = len(cell) and drifts.loc[t, c] < middle
        axis.text(*place, text, ha="center", va="center", color="white" if dark else "black")
    axis.set_xticks(range(drifts.shape[1]), [f"{c:g}" for c in drifts.columns])
    axis.set_yticks(range(drifts.shape[0]), [f"{t:g}" for t in drifts.index])
    metric = _metric(next(cell for cell in cells.values() if len(cell)))
    style(axis, title=benchmark, x="learning-rate multiplier c", y="temperature t")
    axis.grid(visible=False)
    figure.colorbar(picture, ax=axis, label="drift Δλ")
    caption = (
        f"Colour: drift Δλ(t, c), averaged over seeds and init modes. Text: best validation {metric} minus that of the "
        f"GELU baseline with the same seed, averaged likewise, and how many runs a cell has where it is not "
        f"{EXPECTED_RUNS}."
    )
    return figure, caption


FIGURES: dict[str, FigureSpec] = {
    "trajectories": FigureSpec("Validation score over the epochs, {}", draw_trajectories),
    "hardness": FigureSpec("Hardness over depth and epochs, {}", draw_hardness),
    "grid": FigureSpec("Temperature t and multiplier c, {}", draw_grid),
}
