"""Time of a conversion against rows and against width, beside lines of slope 1 and 3."""

import os
from collections.abc import Mapping, Sequence

from lgelu_lab.conversion_bench.cases import CASES
from lgelu_lab.report.drawing import DOTS_PER_INCH, new_figure, style

_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_COLOUR, _GUIDE = "#0072B2", "#666666"
_PANELS = (("rows", "rows of calibration inputs (4 × 256 MLP)", 1), ("width", "width (MLP of 2 layers, 4,096 rows)", 3))


def draw_figure(rows: Sequence[Mapping[str, str]], path: str | os.PathLike) -> None:
    """Write the picture as a PNG. Raises ValueError where a panel has fewer than two points."""
    figure = new_figure(width=9.0, height=3.6)
    for axis, (sweep, label, slope) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        points = sorted((float(row[sweep]), float(row["seconds"])) for row in rows if CASES[row["case"]].sweep == sweep)
        if len(points) < 2:
            raise ValueError(f"{len(points)} points over {sweep} have been measured, two are needed; see --sweep")
        at, seconds = zip(*points, strict=True)
        axis.loglog(at, seconds, "o-", color=_COLOUR, label="measured")
        guide = [seconds[-1] * (value / at[-1]) ** slope for value in at]
        axis.loglog(at, guide, "--", color=_GUIDE, label="∝ rows" if slope == 1 else "∝ width³")
        axis.set_ylim(min(seconds) / 2, max(seconds) * 2)
        axis.set_xticks(at, [f"{int(value):,}" for value in at], minor=False)
        axis.set_xticks([], minor=True)
        axis.set_yticks([tick for tick in _SECONDS if min(seconds) / 2 <= tick <= max(seconds) * 2])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_yticks([], minor=True)
        style(axis, x=label, y="seconds")
        axis.tick_params(axis="x", labelsize=8)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=DOTS_PER_INCH)
