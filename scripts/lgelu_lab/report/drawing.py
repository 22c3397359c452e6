"""How a figure is saved, and what all figures share: palette, axes."""

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = {
    "GELU": "#000000",
    "ReLU": "#882255",
    "λ-GELU uniform": "#009E73",
    "λ-GELU increasing": "#D55E00",
    "λ-GELU decreasing": "#5B4B9A",
    "hardened, swapped": "#0072B2",
    "plain swap": "#666666",
    "converted": "#D55E00",
    "swapped early": "#117733",
}
"""Colours that stay apart for colour-blind readers (after Okabe and Ito) and dark enough for a line on white."""

DOTS_PER_INCH = 150


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches: no window, no global state."""
    from matplotlib.figure import Figure  # takes a second, and records are read without it

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def head(figure: "Figure", text: str, *, fontsize: float, **look: str) -> None:
    """A title over a whole figure, in as many lines as its width needs."""
    letters = int(figure.get_figwidth() / (0.0092 * fontsize))
    figure.suptitle(textwrap.fill(text, letters), fontsize=fontsize, **look)


def save(figure: "Figure", path: Path) -> Path:
    """Write a PNG file, the same bytes from the same records, and return its path.

    What stands in the picture stands in the file as text too, under "Description".
    """
    from matplotlib.text import Text
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    pixels, words = io.BytesIO(), PngInfo()
    figure.savefig(pixels, format="png", dpi=DOTS_PER_INCH)  # axes that matplotlib labels have their texts then
    texts = [text.get_text() for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    words.add_itxt("Description", "\n".join(texts))
    # Lines and letters need no more than 256 colours, and the file is a third as large.
    Image.open(pixels).convert("RGB").quantize(256).save(path, optimize=True, pnginfo=words)
    return path


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
