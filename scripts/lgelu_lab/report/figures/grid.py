"""Heatmap of the grid: colour Δλ(t, c), text ΔBVS(t, c)."""

from typing import TYPE_CHECKING

from lgelu_lab.report.figures.drawing import GREY, Drawing, new_figure
from lgelu_lab.report.grid import EXPECTED_RUNS, Grid, GridCell
from lgelu_lab.report.numbers import MISSING, digits_of, metric_with_direction, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = "cividis"


def draw_grid(grid: Grid) -> Drawing:
    """A cell per (t, c); one without a run is hatched and says so."""
    figure = new_figure(2.2 + 1.35 * len(grid.multipliers), 1.7 + 0.95 * len(grid.temperatures))
    axis = figure.subplots()
    drifts = [cell.drift for cell in grid.cells.values() if cell.drift is not None]
    low, high = min(drifts), max(drifts)
    for row, t in enumerate(grid.temperatures):
        for column, c in enumerate(grid.multipliers):
            _draw_cell(axis, grid, grid.cells[t, c], (column, row), (low, high if high > low else low + 1))
    axis.set_xlim(-0.5, len(grid.multipliers) - 0.5)
    axis.set_ylim(len(grid.temperatures) - 0.5, -0.5)
    axis.set_xticks(range(len(grid.multipliers)), [f"{c:g}" for c in grid.multipliers], fontsize=10.5)
    axis.set_yticks(range(len(grid.temperatures)), [f"{t:g}" for t in grid.temperatures], fontsize=10.5)
    axis.set_xlabel("learning-rate multiplier c", fontsize=10.5)
    axis.set_ylabel("temperature t", fontsize=10.5)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    metric = metric_with_direction(grid.metric, grid.greater_is_better)
    axis.set_title(
        f"{grid.benchmark}: drift Δλ (colour) and\nbest {metric} minus GELU's (text)", fontsize=11, loc="left"
    )
    _bar(figure, axis, low, high if high > low else low + 1)
    return Drawing(
        f"grid-{grid.benchmark}",
        f"Temperature t and multiplier c, {grid.benchmark}",
        f"Colour: drift Δλ(t, c), averaged over seeds and init modes. Text: best validation {metric} minus that of the "
        "GELU baseline with the same seed, averaged likewise. Hatched cells have no run yet; a cell with fewer than "
        f"{EXPECTED_RUNS} runs says how many.",
        figure,
    )


def _draw_cell(axis: "Axes", grid: Grid, cell: GridCell, place: tuple[int, int], ends: tuple[float, float]) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    x, y = place
    corner = (x - 0.485, y - 0.485)
    if cell.drift is None:
        axis.add_patch(Rectangle(corner, 0.97, 0.97, facecolor="0.96", edgecolor="0.75", hatch="///", linewidth=0))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        axis.text(x, y, MISSING, ha="center", va="center", fontsize=10, color=GREY, style="italic", bbox=box)
        return
    colour = colormaps[_COLOURS]((cell.drift - ends[0]) / (ends[1] - ends[0]))
    axis.add_patch(Rectangle(corner, 0.97, 0.97, facecolor=colour, linewidth=0))
    ink = "black" if _luminance(colour) > 0.36 else "white"
    axis.text(x, y, _text(grid, cell), ha="center", va="center", fontsize=10.5, color=ink, linespacing=1.25)


def _text(grid: Grid, cell: GridCell) -> str:
    gain = "no baseline" if cell.gain is None else number(cell.gain, digits_of(grid.metric), signed=True)
    if len(cell.drifts) < EXPECTED_RUNS:
        return f"{gain}\n{len(cell.drifts)} of {EXPECTED_RUNS} runs"
    return gain


def _luminance(colour: tuple[float, ...]) -> float:
    return sum(weight * channel**2.2 for weight, channel in zip((0.2126, 0.7152, 0.0722), colour, strict=False))


def _bar(figure: object, axis: "Axes", low: float, high: float) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    bar = figure.colorbar(ScalarMappable(Normalize(low, high), _COLOURS), ax=axis, pad=0.02)
    bar.set_label("drift Δλ", fontsize=10.5)
    bar.outline.set_visible(False)
