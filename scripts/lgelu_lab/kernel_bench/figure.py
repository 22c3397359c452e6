"""Rows → one picture: time against elements with the copy as the floor, and ratios to nn.GELU size by size."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lgelu_lab.kernel_bench.cases import SIZES, SWEEP_SIZES
from lgelu_lab.kernel_bench.providers import FLOOR, PROVIDERS, REFERENCE
from lgelu_lab.kernel_bench.results import number_text
from lgelu_lab.report.drawing import DOTS_PER_INCH, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cells = dict[str, str]

# Okabe and Ito's colours; dashes and marks tell the lines apart where it is printed grey. In the legend's order.
LOOKS = {
    FLOOR: ("#666666", ":", "|"),
    "relu": ("#E69F00", "-", "v"),
    "lambda_gelu": ("#0072B2", "-", "o"),
    REFERENCE: ("#000000", "--", "s"),
    "lambda_gelu_compiled": ("#56B4E9", "-.", "D"),
    "lambda_gelu:aten": ("#009E73", "-", "^"),
    "swish_beta": ("#CC79A7", "--", "P"),
}


@dataclass(frozen=True)
class Selection:
    """Which rows a picture shows: mode "both", with these values in their columns."""

    dtype: str
    hardness: float
    threads: int
    allocator: str

    def holds(self, row: Cells) -> bool:
        """Whether the row is among them."""
        return (
            row["mode"] == "both"
            and row["provider"] in LOOKS
            and row["dtype"] == self.dtype
            and row["hardness"] in ("", number_text(self.hardness))
            and row["threads"] == str(self.threads)
            and row["allocator"] == self.allocator
        )


def draw_figure(rows: Sequence[Cells], path: str | os.PathLike, selection: Selection) -> None:
    """Write the picture as a PNG.

    Raises ValueError where there is no such row with a λ, or rows of several devices; ImportError without matplotlib.
    """
    kept = [row for row in rows if selection.holds(row)]
    if not any(row["hardness"] for row in kept):  # the title names λ
        what = f"{selection.dtype}, λ = {selection.hardness:g}, {selection.threads} thread(s), {selection.allocator}"
        raise ValueError(f"no row of λ-GELU ({what}) has been measured; see --csv, --dtypes, --hardness and --threads")
    devices = sorted({row["device"] for row in kept})
    if len(devices) > 1:
        raise ValueError(f"the rows are of several devices ({', '.join(devices)}); keep a file for each")
    swept = [row for row in kept if row["size"] in SWEEP_SIZES]
    named = [row for row in kept if row["size"] not in SWEEP_SIZES]
    figure = new_figure(12.0, 5.6)
    left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.0))
    _draw_times(left, swept)
    _draw_ratios(right, named)
    where = f"{selection.threads} thread{'s' * (selection.threads > 1)}" if selection.allocator != "torch" else "GPU"
    figure.suptitle(
        f"Forward and backward, {selection.dtype}, λ = {number_text(selection.hardness)}, {devices[0]}, {where}",
        fontsize=11.5,
    )
    figure.legend(handles=_handles(kept), loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _draw_times(axis: "Axes", rows: Sequence[Cells]) -> None:
    for provider, (colour, dashes, mark) in LOOKS.items():
        points = sorted((int(row["elements"]), row) for row in rows if row["provider"] == provider)
        if not points:
            continue
        sizes = [elements for elements, _ in points]
        low, middle, high = (
            [float(row[f"milliseconds_{name}"]) for _, row in points] for name in ("q20", "median", "q80")
        )
        width = 2.2 if provider == "lambda_gelu" else 1.5
        axis.plot(sizes, middle, color=colour, linestyle=dashes, marker=mark, markersize=4.5, linewidth=width)
        axis.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    style(axis, title="Time of a call (median; band: 0.2 to 0.8 quantile)", x="elements", y="milliseconds")


def _draw_ratios(axis: "Axes", rows: Sequence[Cells]) -> None:
    found = list(dict.fromkeys(_size_of(row) for row in rows))
    sizes = [size for size in SIZES if size in found] + [size for size in found if size not in SIZES]
    shown = [provider for provider in LOOKS if provider != REFERENCE]
    for row in rows:
        if row["provider"] == REFERENCE:
            continue
        colour, _, mark = LOOKS[row["provider"]]
        place = shown.index(row["provider"]) - (len(shown) - 1) / 2
        height = sizes.index(_size_of(row)) + 0.12 * place
        low, middle, high = (float(row[f"ratio_{name}"]) for name in ("q20", "median", "q80"))
        axis.plot((low, high), (height, height), color=colour, linewidth=2, alpha=0.5)
        axis.plot(middle, height, mark, color=colour, markersize=6.5)
    for border in range(1, len(sizes)):
        axis.axhline(border - 0.5, color="black", linewidth=0.5, alpha=0.3)
    axis.axvline(1, color="black", linestyle="--", linewidth=1)
    axis.set_xscale("log")
    axis.set_xticks(_ticks := [0.25, 0.5, 1, 2, 4], [number_text(tick) for tick in _ticks])
    axis.minorticks_off()
    axis.set_yticks(range(len(sizes)), [size.replace(":", "\n") for size in sizes])
    axis.set_ylim(len(sizes) - 0.4, -0.6)
    style(axis, title="Ratio to GELU (median; bar: 0.2 to 0.8 quantile)", x="further left is faster; dashed: GELU")
    axis.grid(visible=False, axis="y")


def _size_of(row: Cells) -> str:
    return f"{row['size']}:{row['memory_format']}" if row["memory_format"] == "channels_last" else row["size"]


def _handles(rows: Sequence[Cells]) -> list:
    from matplotlib.lines import Line2D

    present = {row["provider"] for row in rows}
    taken = " or ".join(sorted({row["kernel"] for row in rows if row["provider"] == "lambda_gelu"}))
    return [
        Line2D(
            [], [], color=colour, linestyle=dashes, marker=mark,
            label=f"λ-GELU (kernel {taken})" if provider == "lambda_gelu" else PROVIDERS[provider].label,
        )
        for provider, (colour, dashes, mark) in LOOKS.items()
        if provider in present
    ]  # fmt: skip
