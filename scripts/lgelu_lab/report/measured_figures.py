"""The figures of what was measured on trained networks, one specification each, a panel per benchmark."""

import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd

from lgelu_lab.report.drawing import GREY, PALETTE, FigureSpec, draw_panels, fit_scores, style
from lgelu_lab.report.frames import MODEL_LABELS, ReportData, of_measurement, rows_by
from lgelu_lab.report.measured_tables import INT8, METHODS, PRECISIONS, RUNGS, STARTS, parameters_left, tunings_of
from lgelu_lab.report.numbers import count, digits_of, number, sampled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = Callable[["Axes", str, pd.DataFrame], None]
Height = Callable[[Mapping[str, pd.DataFrame]], float]
Caption = Callable[[Mapping[str, pd.DataFrame]], str]
Legend = tuple[str, Mapping[str, tuple[str, str | Mapping]]]
"""(column, {its value: (what the legend calls it, colour or look)})."""

_OUTCOMES = {
    "proved": (PALETTE["hardened, swapped"], ("proved",)),
    "refuted": (PALETTE["converted"], ("refuted",)),
    "left open": ("#c9ced4", ("timeout", "unknown", "unconfirmed")),
}
_PRECISION_COLOURS = {
    "float32": "#8c959f",
    "int8-layers": PALETTE["λ-GELU uniform"],
    INT8: PALETTE["hardened, swapped"],
}
_DASHED, _DOTTED = (0, (4, 2)), (0, (1, 1.2))


def colour_of(model: str) -> str:
    """A network's colour; grey for one that is not known."""
    return PALETTE.get(MODEL_LABELS.get(model, model), PALETTE.get(MODEL_LABELS.get(model, ""), GREY))


def _models(found: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """{network's name in the tables: its colour} of those that have a row."""
    there = {model for frame in found.values() for model in frame["model"]}
    known = [model for model in MODEL_LABELS if model in there]
    return {MODEL_LABELS.get(model, model): colour_of(model) for model in [*known, *sorted(there - set(known))]}


def _draw(
    data: ReportData,
    *,
    name: str,
    panel: Panel,
    caption: str | Caption,
    height: float | Height,
    legend: Legend | None = None,
) -> "tuple[Figure, str, str] | None":
    """A panel per benchmark of one measurement, with what of the legend is there; None where nothing was measured."""
    found = of_measurement(data, name)
    if not found:
        return None
    tall = height(found) if callable(height) else height
    said = caption(found) if callable(caption) else caption
    column, entries = legend or ("model", {})
    there = {value for frame in found.values() for value in frame.get(column, entries)}
    looks = {text: look for value, (text, look) in entries.items() if value in there} or _models(found)
    return draw_panels(found, panel, height=tall, colours=looks), said, ""


def mean_and_spread(seeds: pd.DataFrame | None) -> tuple[float, float] | None:
    """(mean, sample standard deviation) of the scores; None where some network is not there.

    Of one seed's accuracy the half of `sampled`, or zero where there is none.
    """
    if seeds is None or not len(seeds) or seeds["score"].isna().any():
        return None
    first, scores = seeds.iloc[0], list(seeds["score"])
    ends = sampled(first["metric"], scores, first["samples"]) or (0.0, 0.0)
    return statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else (ends[1] - ends[0]) / 2


def _int8_panel(axis: "Axes", benchmark: str, frame: pd.DataFrame) -> None:
    size = max(frame["batch_size"])
    groups = rows_by(frame[frame["batch_size"] == size], "model", "precision")
    models = list(dict.fromkeys(model for model, _ in groups))
    offsets = dict(zip(PRECISIONS, (0.27, 0.0, -0.27), strict=True))
    for (model, precision), seeds in groups.items():
        height = len(models) - 1 - models.index(model) + offsets[precision]
        low, median, high = (statistics.fmean(seeds[f"{name}_ms"]) for name in ("quartile1", "median", "quartile3"))
        axis.barh(height, median, height=0.25, color=_PRECISION_COLOURS[precision])
        axis.plot([low, high], [height] * 2, color="black", linewidth=1)
        text = number(statistics.fmean(seeds["score"]), digits_of(seeds["metric"].iloc[0]))
        look = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axis.annotate(text, (max(median, high), height), **look)
    style(axis, title=benchmark, x=f"ms per batch of {size}")
    axis.grid(visible=False, axis="y")
    axis.set_yticks(range(len(models)), [MODEL_LABELS.get(model, model) for model in reversed(models)])
    axis.set_xlim(0, 1.3 * max(statistics.fmean(seeds["quartile3_ms"]) for seeds in groups.values()))


def outcome_counts(seeds: pd.DataFrame) -> dict[str, float]:
    """{outcome: images, mean over the seeds}."""
    return {outcome: float(seeds[list(keys)].sum(axis=1).mean()) for outcome, (_, keys) in _OUTCOMES.items()}


def _verification_panel(axis: "Axes", benchmark: str, frame: pd.DataFrame) -> None:
    rows = rows_by(frame, "model", "epsilon")
    height, ticks, images = 0.0, {}, 1.0
    for model in dict.fromkeys(model for model, _ in rows):
        asked = {epsilon: seeds for (name, epsilon), seeds in rows.items() if name == model}
        refused = any(seeds["refusal"].iloc[0] is not None for seeds in asked.values())
        title = MODEL_LABELS.get(model, model) + (": refused" if refused else "")
        look = {"color": GREY if refused else "black", "style": "italic" if refused else None}
        axis.text(0, height, f" {title}", fontsize=10, va="center", **look)
        for epsilon, seeds in asked.items() if not refused else ():
            height -= 1
            ticks[height] = f"ε = {epsilon:g}"
            images, left = max(images, *seeds["points"]), 0.0
            for outcome, length in outcome_counts(seeds).items():
                axis.barh(height, length, left=left, height=0.75, color=_OUTCOMES[outcome][0])
                left += length
        height -= 1.2
    axis.set_ylim(height + 0.5, 0.7)
    axis.set_xlim(0, 1.02 * images)
    style(axis, title=benchmark, x="images")
    axis.grid(visible=False, axis="y")
    axis.set_yticks(list(ticks), list(ticks.values()))
    axis.tick_params(axis="y", length=0)


def _verification_height(found: Mapping[str, pd.DataFrame]) -> float:
    rows = [rows_by(frame, "model", "epsilon") for frame in found.values()]
    return 0.9 + 0.3 * max(len(asked) + 1.2 * len({model for model, _ in asked}) for asked in rows)


def _zeros_panel(axis: "Axes", benchmark: str, frame: pd.DataFrame) -> None:
    from matplotlib.ticker import MaxNLocator

    for model in dict.fromkeys(frame["model"]):
        layers = rows_by(frame[frame["model"] == model], "layer")
        shares = [100 * statistics.fmean(seeds["off_fraction"]) for seeds in layers.values()]
        exact = next(iter(layers.values()))["gate"].iloc[0] == "relu"
        look = {"linestyle": "-" if exact else _DASHED, "markerfacecolor": colour_of(model) if exact else "white"}
        look |= {"color": colour_of(model), "marker": "o", "markersize": 4.5, "linewidth": 1.6}
        axis.plot(range(1, len(shares) + 1), shares, **look)
    style(axis, title=benchmark, x="layer", y="outputs ≤ 0, %")
    axis.set_ylim(0, 100)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


Point = tuple[float, float, float]
"""(parameters left in per cent, score pruned, score fine-tuned), means over the seeds."""


def pruned_points(frame: pd.DataFrame, model: str, criterion: str) -> list[Point]:
    """One point per fraction that could be removed, the most parameters first."""
    points = []
    for (name, kind, rule, _), seeds in rows_by(frame, "model", "criterion", "rule", "fraction").items():
        done = seeds[seeds["refusal"].isna()]
        if name == model and kind == criterion and rule in ("fraction", None) and len(done):
            scores = (statistics.fmean(done[key]) for key in ("score_pruned", "score_finetuned"))
            points.append((100 * statistics.fmean(parameters_left(done)), *scores))
    return sorted(points, reverse=True)


def _pruning_panel(axis: "Axes", benchmark: str, frame: pd.DataFrame) -> None:
    for model in dict.fromkeys(frame["model"]):
        for criterion, mark in (("apoz", "o"), ("magnitude", "s")):
            points = pruned_points(frame, model, criterion)
            if points:
                left, pruned, finetuned = zip(*points, strict=True)
                look = {"marker": mark, "markersize": 5, "color": colour_of(model)}
                axis.plot(left, finetuned, linewidth=1.6, **look)
                axis.plot(left, pruned, linewidth=1, linestyle=_DASHED, markerfacecolor="white", **look)
        for left, score, _ in pruned_points(frame, model, "dead"):
            axis.plot(left, score, "x", color=colour_of(model), markersize=8, markeredgewidth=2)
    style(axis, title=benchmark, x="parameters left, %", y=str(frame["metric"].iloc[0]))
    axis.invert_xaxis()


def _pieces_panel(axis: "Axes", benchmark: str, frame: pd.DataFrame) -> None:
    for model in dict.fromkeys(frame["model"]):
        steps = rows_by(frame[frame["model"] == model], "perturbation")
        largest = {step: max(seeds["max_error_float64"].dropna(), default=math.nan) for (step,), seeds in steps.items()}
        exact = next(iter(steps.values()))["refusal"].iloc[0] is None
        look = {"linestyle": "-" if exact else _DASHED, "markerfacecolor": colour_of(model) if exact else "white"}
        look |= {"color": colour_of(model), "marker": "o", "markersize": 4.5, "linewidth": 1.6}
        axis.plot(sorted(largest), [largest[step] for step in sorted(largest)], **look)
    axis.set_xscale("log")
    axis.set_yscale("log")
    style(axis, title=benchmark, x="length of the step, L2", y="largest error, units of the scores")


_LINES = {
    "original": (PALETTE["GELU"], "-"),
    "hardened": (PALETTE["hardened, swapped"], (0, (6, 2))),
    "bias-fold": (PALETTE["ReLU"], _DOTTED),
    "direct": (PALETTE["direct swap"], _DASHED),
    "statistics": (PALETTE["direct swap"], _DOTTED),
}
_ALWAYS = ("original", "hardened")
_BESIDE = 0.12  # between the marks of the rungs, in units of a number of rows' place
_RUNG_LOOKS = {
    "place": {"color": PALETTE["λ-GELU uniform"], "marker": "^", "linestyle": " "},
    "place-wider": {"color": PALETTE["λ-GELU uniform"], "marker": "s", "linestyle": " "},
    "blocks": {"color": PALETTE["λ-GELU decreasing"], "marker": "D", "linestyle": " "},
    "distill": {"color": PALETTE["λ-GELU hardened"], "marker": "*", "linestyle": " "},
}
_METHOD_LOOKS = {"refit": {"color": PALETTE["converted"], "marker": "o"}, **_RUNG_LOOKS}
_METHOD_LOOKS |= {name: {"color": colour, "linestyle": dashes} for name, (colour, dashes) in _LINES.items()}


def _conversion_panel(axis: "Axes", benchmark: str, frame: pd.DataFrame) -> None:
    metric = frame["metric"].iloc[0]
    ways = {key: mean_and_spread(seeds) for key, seeds in rows_by(frame, "method", "rows").items()}
    refits = sorted((rows, score) for (method, rows), score in ways.items() if method == "refit" and score)
    rungs = {method: (rows, score) for (method, rows), score in ways.items() if method in _RUNG_LOOKS and score}
    lines = {method: score[0] for (method, _), score in ways.items() if method in _LINES and score}
    for method, height in lines.items():
        colour, dashes = _LINES[method]
        axis.axhline(height, color=colour, linestyle=dashes, linewidth=1.6)
    counts = sorted({rows for rows, _ in (*refits, *rungs.values())})
    if refits:
        means, spreads = zip(*(score for _, score in refits), strict=True)
        look = {"color": PALETTE["converted"], "marker": "o", "markersize": 5, "linewidth": 1.6, "capsize": 3}
        axis.errorbar([counts.index(rows) for rows, _ in refits], means, spreads, **look)
    for place, (method, (rows, (mean, spread))) in enumerate(rungs.items(), start=1):
        at, look = counts.index(rows) + _BESIDE * place, _RUNG_LOOKS[method]
        axis.errorbar([at], [mean], [spread], **look, markersize=6, elinewidth=1, capsize=2)
    if counts:
        axis.set_xticks(range(len(counts)), [count(rows) for rows in counts])
    style(axis, title=benchmark, x=f"calibration {'tokens' if metric == 'perplexity' else 'rows'}", y=str(metric))
    scores = [score for _, score in (*refits, *rungs.values())]
    shown = [*scores, *((lines[method], 0.0) for method in _ALWAYS if method in lines)]
    fit_scores(axis, shown, {METHODS[m]: height for m, height in lines.items() if m not in _ALWAYS}, metric)


def _conversion_caption(found: Mapping[str, pd.DataFrame]) -> str:
    climbed = any(frame["method"].isin(RUNGS).any() for frame in found.values())
    normed = any((frame["method"] == "statistics").any() for frame in found.values())
    return (
        "Points: the refit on so many unlabelled training rows, of text tokens; bars are the sample standard "
        "deviation over seeds (of a single one half the 95 % interval of its evaluation samples), which is mostly "
        "that of the GELU networks: the table has the differences seed by seed. "
        + ("Beside the point of the most rows, on these: the rungs above the refit. " if climbed else "")
        + "Lines, means over seeds: the GELU "
        "network (solid), the hardened network (long dashes), the bias fold on the most rows (dots) and the "
        "direct swap (dashes"
        + (", and dots of the same colour where the statistics of BatchNorm were taken anew" if normed else "")
        + "); what is too far away is written at the edge. Accuracy is better above, perplexity "
        "below."
    )


_START_COLOURS = {
    "direct": PALETTE["direct swap"],
    "refit": PALETTE["converted"],
    "anneal": PALETTE["hardened, swapped"],
    "gelu": PALETTE["GELU"],
}
_RATE_DASHES = ("-", _DASHED, _DOTTED)  # of the learning rates, the highest first
_FEW_STEPS = 10  # up to so many the swapped and annealed networks may still be far away
_APART = 0.08  # between the starts, in units of a step's place


def _tuning_panel(axis: "Axes", benchmark: str, frame: pd.DataFrame) -> None:
    runs, metric = tunings_of(frame), frame["metric"].iloc[0]
    places = {steps: place for place, steps in enumerate(sorted({steps for _, steps, _ in runs}))}
    rates = sorted({rate for _, _, rate in runs if rate is not None}, reverse=True)
    shown, others = [], {}
    for index, (start, colour) in enumerate(_START_COLOURS.items()):
        for line, rate in enumerate(rates or [None]):
            scores = _scores_by_step(runs, start, rate)
            at = [places[steps] + _APART * (index - (len(_START_COLOURS) - 1) / 2) for steps in scores]
            means, spreads = ([score[part] for score in scores.values()] for part in (0, 1))
            look = {
                "color": colour,
                "linestyle": _RATE_DASHES[line % len(_RATE_DASHES)],
                "linewidth": 1.5,
                "capsize": 2,
            }
            look |= {"marker": "o", "markersize": 4.5, "markerfacecolor": "white" if line else colour}
            axis.errorbar(at, means, spreads, elinewidth=1, **look)
            near = start in ("refit", "gelu")
            shown += [score for steps, score in scores.items() if near or steps > _FEW_STEPS]
            others |= {"direct swap": scores[0][0]} if not near and 0 in scores else {}
    axis.set_xticks(list(places.values()), [count(steps) for steps in places])
    style(axis, title=benchmark, x="training steps", y=str(metric))
    if shown:
        fit_scores(axis, shown, others, metric)


def _scores_by_step(
    runs: Mapping[tuple, pd.DataFrame], start: str, rate: float | None
) -> dict[int, tuple[float, float]]:
    found = {
        steps: mean_and_spread(seeds)
        for (name, steps, tried), seeds in runs.items()
        if name == start and tried in (rate, None)
    }
    return {steps: found[steps] for steps in sorted(found) if found[steps]}


def _figure(
    title: str,
    name: str,
    panel: Panel,
    caption: str | Caption,
    height: float | Height,
    legend: Legend | None = None,
) -> FigureSpec:
    return FigureSpec(title, partial(_draw, name=name, panel=panel, caption=caption, height=height, legend=legend))


MEASURED_FIGURES: dict[str, FigureSpec] = {
    "downstream-int8": _figure(
        "Latency and score in float32 and int8",
        "int8",
        _int8_panel,
        "Time of one call of onnxruntime at the largest batch measured, on one thread: bars are the median over "
        "the rounds, thin lines the quartiles, numbers the score. Mean over seeds. Shorter is better.",
        3.4,
        ("precision", {name: (PRECISIONS[name], colour) for name, colour in _PRECISION_COLOURS.items()}),
    ),
    "downstream-verification": _figure(
        "Images proved, refuted and left open",
        "verification",
        _verification_panel,
        "Local robustness asked of Marabou for each ε, a share of the pixels' range: how many images it proves, "
        "refutes with a counterexample that torch confirms, or leaves open in the time given. Mean over seeds. "
        "The networks that it refuses to read are named.",
        _verification_height,
        ("", {outcome: (outcome, colour) for outcome, (colour, _) in _OUTCOMES.items()}),
    ),
    "downstream-zeros": _figure(
        "Outputs of the activations that are not positive, per layer",
        "zeros",
        _zeros_panel,
        "Of ReLU networks (solid, filled marks) these are exact zeros; of smooth ones (dashed, hollow marks) "
        "small negative numbers. Mean over units, training rows and seeds; layers from input to output.",
        3.0,
    ),
    "downstream-pruning": _figure(
        "Score over the parameters left",
        "pruning",
        _pruning_panel,
        "Circles: units with the most zeros removed (APoZ); squares: those with the smallest weights (magnitude). "
        "Hollow and dashed before fine-tuning, filled and solid after it; crosses: only dead units removed, "
        "before fine-tuning. Mean over seeds.",
        3.8,
    ),
    "downstream-linear-pieces": _figure(
        "Error of the linear model around an input",
        "linear_pieces",
        _pieces_panel,
        "Largest error over test rows, scores and seeds, in float64. Solid, filled marks: an exact piece, over "
        "the steps that stay in the row's region; a gap where none stays. Dashed, hollow marks: the first-order "
        "model of a smooth network, over all steps. Lower is better; both scales are logarithmic.",
        3.4,
    ),
    "downstream-conversion": _figure(
        "Score of the refit over the calibration rows",
        "conversion",
        _conversion_panel,
        _conversion_caption,
        3.2,
        ("method", {name: (METHODS[name], look) for name, look in _METHOD_LOOKS.items()}),
    ),
    "downstream-conversion-finetuning": _figure(
        "Score over the training steps around the swap",
        "conversion-finetuning",
        _tuning_panel,
        "Every point is a run of its own. Solid and filled: the higher learning rate; dashed and hollow: the "
        "lower one. Bars are the sample standard deviation over seeds. What is far away with few steps leaves the "
        "panel; its score without a step is written at the edge. Accuracy is better above, perplexity below.",
        3.6,
        ("start", {name: (STARTS[name], colour) for name, colour in _START_COLOURS.items()}),
    ),
}
"""{key: how the figure is made}."""
