"""A figure with its words, how it is saved, and the colours that all figures share."""

import importlib.util
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lgelu_lab.report.numbers import MISSING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for colour-blind readers; dashes help where they are printed grey.
COLOURS = {
    "GELU": "#000000",
    "ReLU": "#E69F00",
    "λ-GELU uniform": "#0072B2",
    "λ-GELU increasing": "#D55E00",
    "λ-GELU decreasing": "#009E73",
    "SiLU": "#56B4E9",
    "Mish": "#CC79A7",
    "PReLU": "#7A5C00",
    "Swish, learnable β": "#6A4C93",
}
DASHES = {"GELU": (0, (5, 2)), "ReLU": (0, (1, 1.2))}
AS_IS, SUBSTITUTED = "#0072B2", "#D55E00"
GREY = "#666666"

DOTS_PER_INCH = 150


@dataclass(frozen=True)
class Drawing:
    """A figure and its words.

    Args:
        key: its file name without suffix.
        title: what it shows of what.
        caption: how to read it, in plain sentences; also the text for those who do not see it.
        figure: of matplotlib.
        note: what holds for this figure alone, such as what is missing in it.
    """

    key: str
    title: str
    caption: str
    figure: "Figure"
    note: str = ""

    def save(self, folder: str | os.PathLike) -> tuple[Path, Path]:
        """Write `folder`/key.png and key.svg, the same bytes from the same records, and return both paths."""
        from matplotlib import rc_context
        from PIL import Image

        png, svg = (Path(folder) / f"{self.key}.{suffix}" for suffix in ("png", "svg"))
        pixels = io.BytesIO()
        self.figure.savefig(pixels, format="png", dpi=DOTS_PER_INCH)
        # Lines and letters need no more than 256 colours, and the file is a third as large.
        Image.open(pixels).convert("RGB").quantize(256).save(png, optimize=True)
        with rc_context({"svg.hashsalt": self.key}):  # or the ids in the file are random
            self.figure.savefig(svg, metadata={"Date": None})
        return png, svg


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches, for the Agg canvas: no window, no global state.

    Raises ImportError, naming the extra, without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("drawing figures needs matplotlib: pip install 'hf-lgelu[benchmarks]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def style(axis: "Axes", *, title: str = "", x: str = "", y: str = "") -> None:
    """Titles, a light grid, and no box where nothing is read off it."""
    axis.set_title(title, fontsize=11, loc="left")
    axis.set_xlabel(x, fontsize=10.5)
    axis.set_ylabel(y, fontsize=10.5)
    axis.tick_params(labelsize=10)
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def write_missing(axis: "Axes", height: float) -> None:
    """Say that a row of the axis has no runs, in the middle of it."""
    axis.text(0.5, height, MISSING, transform=axis.get_yaxis_transform(), color=GREY, style="italic", ha="center")


def seeds_in_words(counts: Sequence[int]) -> str:
    """ "3 seeds", or "1 to 3 seeds" where the configurations differ."""
    low, high = min(counts), max(counts)
    if low != high:
        return f"{low} to {high} seeds"
    return "1 seed" if high == 1 else f"{high} seeds"
