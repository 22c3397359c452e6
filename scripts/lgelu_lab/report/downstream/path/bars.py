"""Bars in groups, the name of a group above its bars: it needs no room at the side of a narrow card."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lgelu_lab.report.downstream.path.layout import INK, Box, plot_at
from lgelu_lab.report.figures.drawing import GREY
from lgelu_lab.report.numbers import MISSING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE = 0.185
"""Height of a line with its gap, in inches; less where a card would not hold its lines otherwise."""

_GAP = 0.4  # lines between two groups


@dataclass(frozen=True)
class Bar:
    """One bar, or several end to end.

    Args:
        pieces: (length, colour) each, from the axis on.
        text: behind its end.
        colour: of the text.
        outline: length of a hollow bar around it.
    """

    pieces: tuple[tuple[float, str], ...]
    text: str
    colour: str
    outline: float | None = None


def draw_bars(figure: "Figure", box: Box, groups: Mapping[str, Sequence[Bar]], *, text_width: float) -> "Axes":
    """{name: bars}, from the top of `box` down; a group without bars is called missing.

    Args:
        figure: to draw on.
        box: the room for the bars and their texts.
        groups: what to draw.
        text_width: inches that the texts behind the longest bar need.

    Returns the axis, which is the box: x in the bars' lengths, y in lines from 0 (the first) down.
    """
    axis = plot_at(figure, box)
    axis.set_axis_off()
    needed = sum(1 + max(1, len(bars)) + _GAP for bars in groups.values()) - _GAP
    lines = max(needed, box.height / LINE)
    axis.set_ylim(0.5 - lines, 0.5)
    longest = max((_length(bar) for bars in groups.values() for bar in bars), default=0) or 1
    axis.set_xlim(0, longest * box.width / (box.width - text_width))
    height = 0.0
    for name, bars in groups.items():
        axis.text(0, height, name, fontsize=9.5, color=INK, va="center")
        if not bars:
            height -= 1
            axis.text(0, height, f" {MISSING}", fontsize=9.5, color=GREY, va="center", style="italic")
        for bar in bars:
            height -= 1
            _draw_bar(axis, height, bar)
        height -= 1 + _GAP
    return axis


def _length(bar: Bar) -> float:
    return max(sum(length for length, _ in bar.pieces), bar.outline or 0)


def _draw_bar(axis: "Axes", height: float, bar: Bar) -> None:
    end = 0.0
    for length, colour in bar.pieces:
        axis.barh(height, length, left=end, height=0.72, color=colour)
        end += length
    if bar.outline is not None:
        axis.barh(height, bar.outline, height=0.72, facecolor="none", edgecolor=bar.colour, linewidth=1)
    axis.annotate(
        bar.text, (_length(bar), height), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9.5,
        color=bar.colour,
    )  # fmt: skip
