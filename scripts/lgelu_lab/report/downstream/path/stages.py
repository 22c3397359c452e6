"""The first three cards: a smooth network, its gates made hard, ReLU in their place."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lgelu_lab.report.configurations import grouped, of_benchmark
from lgelu_lab.report.correlation import hardness_path
from lgelu_lab.report.downstream.path.bars import Bar, draw_bars
from lgelu_lab.report.downstream.path.layout import BETWEEN, HARD, INK, SMOOTH, Box, plot_at
from lgelu_lab.report.figures.drawing import GREY
from lgelu_lab.report.numbers import MISSING, largest, number
from lgelu_lab.studies.records import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GELU, LEARNED, HARDENED = "GELU", "λ-GELU uniform", "λ-GELU uniform, hardened"
SWAPPED = {"GELU": (GELU, SMOOTH), "λ as learned": (LEARNED, BETWEEN), "hardened": (HARDENED, HARD)}
"""{what the third card calls a network: its configuration and colour}."""

Networks = Mapping[str, Mapping[str, Sequence[RunRecord]]]
"""{benchmark: {configuration label: its seeds}}."""


def networks_of(runs: Sequence[RunRecord], benchmarks: Sequence[str]) -> Networks:
    """The runs by benchmark and configuration; an empty mapping for a benchmark without any."""
    groups = grouped(runs)
    return {benchmark: of_benchmark(groups, benchmark) for benchmark in benchmarks}


def per_cent(values: Sequence[float | None]) -> str:
    """ "97.3 ± 0.2" per cent, over seeds; "missing" where there is none or one was not measured."""
    if not values or any(value is None for value in values):
        return MISSING
    shown = [100 * value for value in values]
    spread = f" ± {statistics.stdev(shown):.1f}" if len(shown) > 1 else ""
    return f"{statistics.fmean(shown):.1f}{spread}"


def draw_smooth(figure: "Figure", sheet: "Axes", box: Box, networks: Networks, names: Mapping[str, str]) -> None:
    """The gate for a few λ, and the accuracy of GELU and of λ-GELU with every λ at its target."""
    axis = plot_at(figure, Box(box.x + 0.2, box.y + 1.02, 1.5, 1.05))
    points = [-3 + 0.02 * step for step in range(226)]
    for hardness, colour in ((1.0, SMOOTH), (160.0, HARD)):
        gate = [x * 0.5 * math.erfc(-hardness * x / math.sqrt(2)) for x in points]
        axis.plot(points, gate, color=colour, linewidth=1.9)
    axis.set_axis_off()
    for height, colour, text in ((0.42, SMOOTH, "λ = 1: GELU"), (0.16, HARD, "λ = 160:\nnearly ReLU")):
        sheet.text(box.x + 1.85, box.y + 1.3 + height, text, fontsize=9.5, color=colour, va="top")
    heads = ["accuracy, %", *names.values()]
    rows = [(SMOOTH, "GELU", [_scores(networks[name], GELU) for name in names])]
    rows.append((HARD, "hardened", [_scores(networks[name], HARDENED) for name in names]))
    lines = [(INK, heads), *((colour, [label, *map(per_cent, values)]) for colour, label, values in rows)]
    for line, (colour, texts) in enumerate(lines):
        for column, text in enumerate(texts):
            place = box.x + 0.16 if column == 0 else box.x + box.width - 0.16 - 1.13 * (len(names) - column)
            look = {"color": GREY if line == 0 else colour, "fontsize": 9.5, "va": "center"}
            style = "italic" if text == MISSING else "normal"
            sheet.text(place, box.y + 0.8 - 0.26 * line, text, ha="right" if column else "left", style=style, **look)


def draw_hardness(figure: "Figure", box: Box, networks: Networks, names: Mapping[str, str]) -> None:
    """λ of every layer over the epochs: a line per layer, a panel per benchmark."""
    width = (box.width - 0.62 - 0.16 - 0.15 * (len(names) - 1)) / len(names)
    for column, (benchmark, name) in enumerate(names.items()):
        left = box.x + 0.62 + column * (width + 0.15)
        axis = plot_at(figure, Box(left, box.y + 0.52, width, box.height - 1.72))
        axis.set_title(name, fontsize=9.5, color=GREY, pad=4)
        axis.set_xlabel("epoch", fontsize=9.5, color=GREY, labelpad=1)
        axis.set_yscale("log")
        axis.set_ylim(0.85, 260)
        axis.set_yticks([1, 10, 100], ["1", "10", "100"] if column == 0 else [])
        axis.yaxis.set_minor_formatter("")
        axis.minorticks_off()
        seeds = networks[benchmark].get(HARDENED)
        if seeds:
            _draw_paths(axis, seeds)
        else:
            axis.text(0.5, 0.5, MISSING, transform=axis.transAxes, ha="center", color=GREY, style="italic")
            axis.set_xticks([])
        if column == 0:
            axis.set_ylabel("λ", fontsize=11, color=INK, rotation=0, labelpad=8, va="center")


def _draw_paths(axis: "Axes", seeds: Sequence[RunRecord]) -> None:
    paths = [hardness_path(record) for record in seeds]
    epochs = sorted(set.intersection(*map(set, paths)))
    layers = zip(*([statistics.fmean(values) for values in zip(*(path[epoch] for path in paths), strict=True)]
                   for epoch in epochs), strict=True)  # fmt: skip
    for layer in layers:
        axis.plot(epochs, layer, color=HARD, linewidth=1.4, alpha=0.75)
    axis.set_xlim(0, epochs[-1])
    axis.set_xticks([0, epochs[-1]], ["0", f"{epochs[-1]:g}"])


def draw_swap(figure: "Figure", box: Box, networks: Networks, names: Mapping[str, str]) -> None:
    """What the swap does to accuracy and logits of each network that has smooth gates: a bar each per benchmark."""
    groups = {name: _changes(networks[benchmark]) for benchmark, name in names.items()}
    draw_bars(figure, Box(box.x + 0.16, box.y + 0.34, box.width - 0.3, box.height - 1.22), groups, text_width=1.3)


def _changes(groups: Mapping[str, Sequence[RunRecord]]) -> list[Bar]:
    bars = []
    for label, colour in SWAPPED.values():
        epochs = [record.last for record in groups.get(label, ()) if record.last.relu_score is not None]
        if epochs:
            mean = round(100 * statistics.fmean(epoch.relu_score - epoch.score for epoch in epochs), 2) + 0.0
            logit = largest([epoch.relu_max_logit_change for epoch in epochs])
            text = f"{number(mean, 2, signed=True)}, logit {logit}"
            bars.append(Bar(((max(0.0, -mean), colour),), text, colour))
    return bars


def _scores(groups: Mapping[str, Sequence[RunRecord]], label: str) -> list[float]:
    return [record.last.score for record in groups.get(label, ())]
