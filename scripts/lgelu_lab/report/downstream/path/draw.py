"""The whole path on one sheet: three stages above, what they enable below."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.path.bars import draw_bars
from lgelu_lab.report.downstream.path.gains import GAINS, Gain
from lgelu_lab.report.downstream.path.layout import INK, Box, draw_arrow, draw_branches, draw_card, draw_legend, sheet
from lgelu_lab.report.downstream.path.stages import (
    SWAPPED,
    draw_hardness,
    draw_smooth,
    draw_swap,
    networks_of,
)
from lgelu_lab.report.downstream.tables.basis import machine_of
from lgelu_lab.report.figures.drawing import GREY, Drawing, new_figure, seeds_in_words
from lgelu_lab.report.numbers import either
from lgelu_lab.studies.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"mlp-digits": "digits", "mlp-fmnist": "Fashion-MNIST"}
"""The benchmarks of the picture, and what it calls them."""

_TOOLS = ("torch", "onnxruntime", "maraboupy")
_WIDTH, _EDGE = 10.0, 0.15
_BELOW, _ABOVE = Box(_EDGE, 0.55, 2.3, 3.3), Box(_EDGE, 4.35, 3.0, 2.75)
_HEIGHT = 7.65


def draw_path(runs: Sequence[RunRecord], measurements: Sequence[MeasurementRecord]) -> Drawing | None:
    """The picture for the benchmarks in NAMES; None where neither a run nor a measurement of them is there.

    Args:
        runs: those of the study "downstream".
        measurements: of their networks.
    """
    runs = [run for run in runs if run.config["benchmark"] in NAMES]
    measurements = [record for record in measurements if record.benchmark in NAMES]
    if not runs and not measurements:
        return None
    figure = new_figure(_WIDTH, _HEIGHT)
    axis = sheet(figure)
    title = "From a smooth network to a ReLU network, and what that enables"
    axis.text(_EDGE, _HEIGHT - 0.15, title, fontsize=15, fontweight="bold", va="top", color=INK)
    _draw_stages(figure, axis, runs)
    for box, gain in zip(_row(_BELOW, len(GAINS)), GAINS, strict=True):
        _draw_gain(figure, axis, box, gain(measurements, NAMES))
    tops = [(box.x + box.width / 2, box.y + box.height + 0.03) for box in _row(_BELOW, len(GAINS))]
    swap = _row(_ABOVE, 3)[-1]
    draw_branches(axis, (swap.x + swap.width / 2, swap.y), tops)
    note = _basis(runs, measurements)
    axis.text(_EDGE, 0.4, note, fontsize=9, color=GREY, va="top", linespacing=1.35)
    return Drawing(
        "path",
        title,
        "A network is trained with λ-GELU, every λ is driven to its target, and ReLU takes the gates' place with the "
        "same weights. Integer inference, proofs, the removal of dead units and exact linear pieces follow. Every "
        "number is from a record; what was not measured is called missing.",
        figure,
        note.replace("\n", " "),
    )


def _row(first: Box, count: int) -> list[Box]:
    """Boxes like the first one, spread over the sheet."""
    step = (_WIDTH - 2 * _EDGE - first.width) / (count - 1)
    return [Box(first.x + step * place, first.y, first.width, first.height) for place in range(count)]


def _draw_stages(figure: "Figure", axis: "Axes", runs: Sequence[RunRecord]) -> None:
    networks = networks_of(runs, list(NAMES))
    boxes = smooth, hardness, swap = _row(_ABOVE, 3)
    draw_card(axis, smooth, "1  Train smooth", "with a gate x·Φ(λx) in place of GELU")
    draw_card(
        axis,
        hardness,
        "2  Harden",
        "λ of every layer is learned, then driven\nto its target while the weights train on",
    )
    draw_card(
        axis,
        swap,
        "3  Swap in ReLU",
        "the same weights; change of accuracy\nin points, largest change of a logit",
    )
    draw_smooth(figure, axis, smooth, networks, NAMES)
    draw_hardness(figure, hardness, networks, NAMES)
    draw_swap(figure, swap, networks, NAMES)
    draw_legend(axis, swap, {text: colour for text, (_, colour) in SWAPPED.items()})
    for left, right in pairwise(boxes):
        middle = left.y + left.height / 2
        draw_arrow(axis, (left.x + left.width + 0.04, middle), (right.x - 0.04, middle))


def _draw_gain(figure: "Figure", axis: "Axes", box: Box, gain: Gain) -> None:
    draw_card(axis, box, gain.title, gain.says)
    room = Box(box.x + 0.16, box.y + 0.34, box.width - 0.24, box.height - 1.22)
    draw_bars(figure, room, gain.groups, text_width=gain.text_width)
    draw_legend(axis, box, gain.legend)


def _basis(runs: Sequence[RunRecord], measurements: Sequence[MeasurementRecord]) -> str:
    """Seeds of each benchmark, machine, and versions of the tools."""
    counts: dict[str, list[int]] = {}
    for benchmark, name in NAMES.items():
        trained = [run.config["activation"] for run in runs if run.config["benchmark"] == benchmark]
        made = [record.measurement for record in measurements if record.benchmark == benchmark]
        if trained or made:
            # Hardened and learned λ-GELU are both "lambda_gelu"; GELU has one run a seed.
            counts[name] = [number for number in (trained.count("gelu"), *Counter(made).values()) if number]
    counted = ", ".join(f"{name} {seeds_in_words(found)}" for name, found in counts.items() if found)
    first = f"Means over seeds: {counted}. Accuracy ± sample standard deviation."
    if not measurements:
        return first
    machines = either([machine_of(record) for record in measurements])
    tools = ", ".join(f"{tool} {_versions(measurements, tool)}" for tool in _TOOLS if _versions(measurements, tool))
    return f"{first}\n{machines}; {tools}."


def _versions(measurements: Sequence[MeasurementRecord], tool: str) -> str:
    return either([record.versions[tool] for record in measurements if tool in record.versions])
