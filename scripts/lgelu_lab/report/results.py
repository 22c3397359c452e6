"""The main results: every way to a ReLU network beside the smooth one, as a table, as a picture and in sentences."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from lgelu_lab.report.drawing import GREY, PALETTE, FigureSpec, new_figure, style
from lgelu_lab.report.frames import ReportData, of_measurement, rows_by
from lgelu_lab.report.markup import Cell, Column, Group, Row, TableSpec
from lgelu_lab.report.numbers import (
    MISSING,
    NONE,
    digits_of,
    listed,
    mean_and_deviation,
    metrics_in_words,
    number,
)
from lgelu_lab.report.paper import Notes, marked
from lgelu_lab.report.run_tables import ONE_SEED, WAYS, expected_benchmarks, way_text, ways_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTH, CONVERTED = "GELU, smooth", "Converted, no training"
DIRECT, HARDENED, EARLY, FROM_START = WAYS
_OTHER_NETWORKS = "‡"


def results_of(data: ReportData, benchmark: str) -> dict[str, pd.DataFrame]:
    """{way: its seeds} of one benchmark, with the smooth network first; each has `benchmark`, `seed` and `value`.

    `value` is the score in the last epoch with ReLU in place, of the smooth network as it is; of converted networks
    that after the refit on the most calibration rows, with `original`, the score before. Empty frames for what is not
    there.
    """
    ways = ways_of(data, benchmark)
    found = {SMOOTH: ways[DIRECT].assign(value=ways[DIRECT]["last_score"])}
    found |= {way: seeds.assign(value=seeds["relu"]) for way, seeds in ways.items()}
    found[CONVERTED] = _converted(data, benchmark)
    return {way: found[way] for way in (SMOOTH, DIRECT, CONVERTED, HARDENED, EARLY, FROM_START)}


def _converted(data: ReportData, benchmark: str) -> pd.DataFrame:
    frame = of_measurement(data, "conversion").get(benchmark)
    refits = {} if frame is None else rows_by(frame[frame["method"] == "refit"], "rows")
    if not refits:
        return pd.DataFrame(columns=["benchmark", "seed", "metric", "value", "original", "eval_samples"])
    (rows,) = max(refits)
    names = {"score": "value", "original_score": "original", "samples": "eval_samples"}
    return refits[rows,].rename(columns=names).dropna(subset="value")


def _cell(way: str) -> Column:
    def cell(ways: dict[str, pd.DataFrame], notes: Notes) -> Cell | str:
        seeds = ways[way]
        if way == CONVERTED and not len(seeds):
            return NONE
        text = way_text(seeds, "value", brief=True)
        others = way == CONVERTED and _are_others(seeds, ways[SMOOTH])
        return f"{text} {_OTHER_NETWORKS}" if others else text

    return Column(way, cell)


def _are_others(converted: pd.DataFrame, smooth: pd.DataFrame) -> bool:
    """Whether the networks that were converted are not those of the column of smooth ones."""
    if set(converted["seed"]) != set(smooth["seed"]):
        return True
    pairs = converted.merge(smooth[["seed", "last_score"]], on="seed")
    return bool((abs(pairs["original"] / pairs["last_score"] - 1) > 1e-3).any())


def _benchmark(ways: dict[str, pd.DataFrame], notes: Notes) -> str:
    trained = [seeds for way, seeds in ways.items() if way != CONVERTED and len(seeds)]
    return trained[0]["benchmark"].iloc[0] + marked(pd.concat(trained), notes)


def _rows(data: ReportData) -> Iterator[Group]:
    for benchmark in dict.fromkeys(data.part("")["benchmark"]):
        ways = results_of(data, benchmark)
        if any(len(seeds) for way, seeds in ways.items() if way != CONVERTED):
            yield (), ways


def _columns(data: ReportData) -> tuple[Column, ...]:
    def paper(ways: dict[str, pd.DataFrame], notes: Notes) -> str:
        name = next(seeds["benchmark"].iloc[0] for way, seeds in ways.items() if way != CONVERTED and len(seeds))
        gelu = data.paper.text(name, "gelu", "as_is")
        first = gelu if gelu != NONE else data.paper.text(name, "gelu", "best_validation_score").partition(" ")[0]
        swapped = data.paper.text(name, "gelu", "substituted")
        return listed([first, swapped, data.paper.text(name, "lambda_gelu-uniform-hardened", "substituted")])

    names = expected_benchmarks(data.part(""))
    shown = any(data.paper.has(names, quantity) for quantity in ("substituted", "best_validation_score"))
    beside = (Column("Paper: GELU, swapped, hardened and swapped", paper),) if shown else ()
    return (Column("Benchmark", _benchmark), *map(_cell, results_columns()), *beside)


def results_columns() -> tuple[str, ...]:
    """The ways in the order of the table's columns, the smooth network first."""
    return (SMOOTH, DIRECT, CONVERTED, HARDENED, EARLY, FROM_START)


def _notes(data: ReportData, rows: Sequence[Row]) -> Iterator[str]:
    others = []
    for benchmark in dict.fromkeys(data.part("")["benchmark"]):
        ways = results_of(data, benchmark)
        converted = ways[CONVERTED]
        if len(converted) and _are_others(converted, ways[SMOOTH]):
            score = mean_and_deviation(list(converted["original"]), digits_of(converted["metric"].iloc[0]))
            others.append(f"{benchmark} {score}")
    if others:
        yield f"{_OTHER_NETWORKS} Converted from GELU networks of the same recipe that score, smooth: {listed(others)}."
    if data.paper.citation:
        yield f"Paper: {data.paper.citation}, at its best epochs; ours are of the last epoch."


RESULTS = TableSpec(
    title="Every way to a ReLU network, score in the last epoch",
    caption=lambda data: (
        f"{metrics_in_words(data.part(''))} The columns behind the smooth network are networks with ReLU alone. Mean ± "
        f"sample standard deviation over three seeds; fewer are counted in brackets. {ONE_SEED}"
    ),
    rows=_rows,
    head=(),
    columns=_columns,
    notes=_notes,
    text_columns=1,
    in_groups=False,
)


def conclusions(data: ReportData) -> list[str]:
    """Three sentences on what came out, each with its numbers; fewer where runs are missing."""
    results = {name: results_of(data, name) for name in dict.fromkeys(data.part("")["benchmark"])}
    says = (
        ("Putting ReLU into a finished GELU network", SMOOTH, DIRECT),
        ("Refitting the linear maps behind the gates, without training or labels,", None, CONVERTED),
        ("After hardening, ReLU with the same weights", "", HARDENED),
    )
    return [text for text in (_conclusion(words, results, *ways) for words, *ways in says) if text]


def _conclusion(words: str, results: dict[str, dict[str, pd.DataFrame]], before: str | None, way: str) -> str:
    """ "... costs 4.4 points of accuracy on mlp-adult, ...": the change of each benchmark, from `before` to `way`.

    `before` is a way's name, None for the converted networks' own original, "" for the same network as trained.
    """
    changes = []
    for name, ways in results.items():
        seeds = ways[way]
        if not len(seeds):
            continue
        own = {None: "original", "": "last_score"}.get(before)
        first = statistics.fmean(seeds[own] if own else ways[before]["value"])
        last, metric = statistics.fmean(seeds["value"]), seeds["metric"].iloc[0]
        if metric == "accuracy":
            changes.append(f"{name} {number(100 * (last - first), 2, signed=True)} points")
        else:
            digits = digits_of(metric)
            changes.append(f"{name} {metric} {number(first, digits)} → {number(last, digits)}")
    return f"{words} changes the score of {listed(changes)}." if changes else ""


@dataclass(frozen=True)
class HeroPanel:
    """One panel of the picture of the main results: a benchmark, and what the picture calls it."""

    benchmark: str
    title: str


HERO: tuple[HeroPanel, ...] = (
    HeroPanel("mlp-adult", "MLP on Adult"),
    HeroPanel("gpt2-wikitext2", "Small GPT-2 on WikiText-2"),
)
_HERO_WAYS = {
    DIRECT: ("ReLU swapped in as it is", PALETTE["direct swap"]),
    CONVERTED: ("converted, no training", PALETTE["converted"]),
    HARDENED: ("hardened, then swapped", PALETTE["hardened, swapped"]),
    FROM_START: ("ReLU from the start", PALETTE["ReLU"]),
}


def draw_path(data: ReportData) -> "tuple[Figure, str, str] | None":
    """A panel per benchmark of HERO that is there: a bar per way, from the smooth network's line to its score."""
    found = {panel: results_of(data, panel.benchmark) for panel in HERO}
    found = {panel: ways for panel, ways in found.items() if len(ways[SMOOTH])}
    if not found:
        return None
    figure = new_figure(1.6 + 4.2 * len(found), 3.1)
    axes = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for axis, (panel, ways) in zip(axes, found.items(), strict=True):
        _draw_hero(axis, panel, ways)
    names = [text for text, _ in reversed(_HERO_WAYS.values())]
    axes[0].set_yticks(range(len(names)), names)
    figure.suptitle("From a smooth network to a ReLU network: what each way costs", fontsize=13, fontweight="bold")
    caption = (
        "The line is the smooth GELU network in its last epoch; a bar reaches from it to the ReLU network's score, "
        "mean over seeds; thin lines reach from the lowest to the highest seed. Converted: the linear maps behind the "
        "gates are refitted on unlabelled rows. Hardened: trained with λ-GELU while every λ grows to about 160."
    )
    return figure, caption, ""


def _draw_hero(axis: "Axes", panel: HeroPanel, ways: dict[str, pd.DataFrame]) -> None:
    smooth, first = statistics.fmean(ways[SMOOTH]["value"]), ways[SMOOTH].iloc[0]
    greater = bool(first["greater_is_better"])
    values = [value for way in _HERO_WAYS for value in ways[way]["value"]]
    ends = min([smooth, *values]), max([smooth, *values])
    room = ends[1] - ends[0] or 0.01
    for height, (way, (_, colour)) in enumerate(reversed(_HERO_WAYS.items())):
        seeds = list(ways[way]["value"])
        if not seeds:
            axis.text(smooth, height, f"  {MISSING}", color=GREY, style="italic", va="center")
            continue
        mean = statistics.fmean(seeds)
        axis.barh(height, mean - smooth, left=smooth, height=0.56, color=colour)
        axis.plot((min(seeds), max(seeds)), (height, height), color=PALETTE["GELU"], linewidth=1.2, zorder=4)
        right = mean > smooth if abs(mean - smooth) > 0.01 * room else not greater
        at = max([smooth, *seeds]) if right else min([smooth, *seeds])
        look = {"xytext": (6 if right else -6, 0), "textcoords": "offset points", "ha": "left" if right else "right"}
        axis.annotate(
            _hero_text(mean, smooth, first["metric"]), (at, height), va="center", fontsize=10, color=colour, **look
        )
    axis.axvline(smooth, color=PALETTE["GELU"], linewidth=2, zorder=3)
    axis.set_xlim(ends[0] - (0.5 if greater else 0.05) * room, ends[1] + (0.42 if greater else 0.5) * room)
    digits = 3 if greater else 1
    axis.annotate(
        f"smooth GELU {number(smooth, digits)}", (smooth, 1), xycoords=("data", "axes fraction"), fontsize=10,
        xytext=(0, 3), textcoords="offset points", ha="right" if greater else "left", va="bottom",
    )  # fmt: skip
    style(axis, x=f"{first['metric']} ({'higher' if greater else 'lower'} is better)")
    axis.set_title(panel.title, fontsize=11, loc="left", pad=18, fontweight="bold")
    axis.grid(visible=False, axis="y")
    axis.set_ylim(-0.55, len(_HERO_WAYS) - 0.45)


def _hero_text(mean: float, smooth: float, metric: str) -> str:
    """ "0.811 (−4.4 points)", or of a perplexity its change in per cent."""
    if metric == "accuracy":
        return f"{number(mean, 3)} ({number(100 * (mean - smooth), 1, signed=True)} points)"
    return f"{number(mean, 1)} ({number(100 * (mean / smooth - 1), 1, signed=True)} %)"


PATH = FigureSpec("From a smooth network to a ReLU network: what each way costs", draw_path)
"""The picture that the README opens with."""
