"""A figure with its words, how it is saved, and what all figures share: palette, panels, legend, axes."""

import importlib.util
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lgelu_lab.report.frames import ReportData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#666666"
PALETTE = {
    "GELU": "#000000",
    "ReLU": "#882255",
    "λ-GELU uniform": "#009E73",
    "λ-GELU increasing": "#D55E00",
    "λ-GELU decreasing": "#5B4B9A",
    "λ-GELU hardened": "#B5588A",
    "hardened, swapped": "#0072B2",
    "plain swap": GREY,
    "converted": "#D55E00",
    "swapped early": "#117733",
}
"""Colours that stay apart for colour-blind readers (after Okabe and Ito) and dark enough for a line on white."""

PALETTE |= {"ReLU from the start": PALETTE["ReLU"], "λ-GELU as learned": PALETTE["λ-GELU uniform"]}

DOTS_PER_INCH = 150


@dataclass(frozen=True)
class Drawing:
    """A figure and its words.

    Args:
        key: its file name without suffix.
        title: what it shows of what.
        caption: how to read it, in plain sentences; also the text for those who do not see it.
        figure: of matplotlib.
    """

    key: str
    title: str
    caption: str
    figure: "Figure"

    def save(self, folder: str | os.PathLike) -> Path:
        """Write `folder`/key.png, the same bytes from the same records, and return its path.

        What stands in the picture stands in the file as text too, under "Description".
        """
        from PIL import Image
        from PIL.PngImagePlugin import PngInfo

        path, pixels, words = Path(folder) / f"{self.key}.png", io.BytesIO(), PngInfo()
        self.figure.savefig(pixels, format="png", dpi=DOTS_PER_INCH)
        words.add_itxt("Description", "\n".join(self.texts))
        # Lines and letters need no more than 256 colours, and the file is a third as large.
        Image.open(pixels).convert("RGB").quantize(256).save(path, optimize=True, pnginfo=words)
        return path

    @property
    def texts(self) -> list[str]:
        """What is written in the picture; of axes that matplotlib labels, what it chose when it was drawn."""
        from matplotlib.text import Text

        return [text.get_text() for text in self.figure.findobj(Text) if text.get_text() and text.get_visible()]


@dataclass(frozen=True)
class FigureSpec:
    """How a figure is made of a report's data.

    Args:
        title: what it shows.
        draw: data → (figure, caption), or None where there is nothing to draw.
    """

    title: str
    draw: Callable[..., "tuple[Figure, str] | None"]


def draw(key: str, spec: FigureSpec, data: ReportData) -> Drawing | None:
    """The drawing of a specification; None where there is nothing to show."""
    made = spec.draw(data)
    return Drawing(key, spec.title, made[1], made[0]) if made else None


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


def plain(text: str) -> str:
    """A text of a record as it is: matplotlib takes what stands between two $ for a formula."""
    return text.replace("$", r"\$")


def style(axis: "Axes", *, title: str = "", x: str = "", y: str = "") -> None:
    """Titles, a light grid, and no box where nothing is read off it."""
    axis.set_title(plain(title), fontsize=11, loc="left")
    axis.set_xlabel(plain(x), fontsize=10.5)
    axis.set_ylabel(plain(y), fontsize=10.5)
    axis.tick_params(labelsize=10)
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
