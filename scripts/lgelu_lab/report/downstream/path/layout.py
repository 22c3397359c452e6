"""Cards and the arrows between them, placed in inches from the lower left corner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lgelu_lab.report.figures.drawing import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PANEL, EDGE = "#1d2125", "#f5f7fa", "#d5dbe1"
SMOOTH, BETWEEN, HARD = "#3b3b3b", "#4a8fb5", "#0072B2"
"""The colours of GELU, of λ-GELU as learned, and of the hardened network, in every card."""

_PADDING = 0.16


@dataclass(frozen=True)
class Box:
    """A rectangle in inches: its lower left corner and its size."""

    x: float
    y: float
    width: float
    height: float


def sheet(figure: "Figure") -> "Axes":
    """An invisible axis over the whole figure, whose units are inches."""
    figure.set_layout_engine("none")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_xlim(0, figure.get_figwidth())
    axis.set_ylim(0, figure.get_figheight())
    axis.set_axis_off()
    return axis


def draw_card(axis: "Axes", box: Box, title: str, says: str) -> None:
    """A card with a title, and a sentence of a line or two below it."""
    from matplotlib.patches import FancyBboxPatch

    axis.add_patch(
        FancyBboxPatch(
            (box.x + 0.08, box.y + 0.08), box.width - 0.16, box.height - 0.16,
            boxstyle="round,pad=0.08,rounding_size=0.1", facecolor=PANEL, edgecolor=EDGE, linewidth=1,
        )
    )  # fmt: skip
    left, top = box.x + _PADDING, box.y + box.height
    axis.text(left, top - 0.14, title, fontsize=12, fontweight="bold", color=INK, va="top")
    axis.text(left, top - 0.42, says, fontsize=9.5, color=GREY, va="top", linespacing=1.3)


def draw_legend(axis: "Axes", box: Box, entries: Mapping[str, str]) -> None:
    """{text: colour}, a small square each, at the foot of a card."""
    left, renderer = box.x + _PADDING, axis.figure.canvas.get_renderer()
    for text, colour in entries.items():
        axis.plot([left + 0.05], [box.y + 0.2], marker="s", color=colour, markersize=6)
        shown = axis.text(left + 0.14, box.y + 0.19, text, fontsize=9, color=GREY, va="center")
        left += 0.14 + shown.get_window_extent(renderer).width / axis.figure.dpi + 0.1


def draw_arrow(axis: "Axes", start: tuple[float, float], end: tuple[float, float]) -> None:
    """A short thick arrow."""
    look = {"arrowstyle": "-|>,head_width=0.32,head_length=0.5", "linewidth": 2.2, "color": HARD, "shrinkA": 0}
    axis.annotate("", xy=end, xytext=start, arrowprops={**look, "shrinkB": 0})


def draw_branches(axis: "Axes", start: tuple[float, float], ends: Sequence[tuple[float, float]]) -> None:
    """From `start` down to half the way, then to the side, then an arrow down to each of `ends`."""
    middle = (start[1] + ends[0][1]) / 2 + 0.06
    places = [start[0], *(x for x, _ in ends)]
    axis.plot([start[0]] * 2, [start[1], middle], color=HARD, linewidth=2.2, solid_capstyle="round")
    axis.plot([min(places), max(places)], [middle] * 2, color=HARD, linewidth=2.2, solid_capstyle="round")
    for x, y in ends:
        draw_arrow(axis, (x, middle), (x, y))


def plot_at(figure: "Figure", box: Box) -> "Axes":
    """An axis for data whose frame fills `box`; its labels lie outside."""
    width, height = figure.get_figwidth(), figure.get_figheight()
    axis = figure.add_axes((box.x / width, box.y / height, box.width / width, box.height / height))
    axis.set_facecolor("none")
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(GREY)
    axis.tick_params(labelsize=9, colors=GREY, labelcolor=INK, length=3)
    return axis
