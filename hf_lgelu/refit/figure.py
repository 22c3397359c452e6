"""A conversion as one picture: the error of each layer, and the network before and after."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_lgelu.files import save_picture
from hf_lgelu.formats import score, significant
from hf_lgelu.refit.report import ConversionReport, Evaluation, LayerRefit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DOTS_PER_INCH = 130
# Okabe and Ito's colours, which stay apart for colour-blind readers; the markers help where they are printed grey.
_KEPT, _CHOSEN = "#D55E00", "#0072B2"
_SETS = (("held out", "o", "#0072B2"), ("second set", "D", "#009E73"))
_NETWORKS = ("original", "direct swap", "refitted")


def draw_conversion(path: str | os.PathLike, report: ConversionReport) -> Path:
    """Write a PNG of two panels and return its path.

    Left, each layer's relative error on rows that it was not fitted on, with its weights kept and as chosen, on a
    logarithmic axis. Right, the first metric of original, direct swap and refitted network, or where there is none
    their KL to the original (of other outputs than logits, the relative error).

    Args:
        path: of the file, whose folder is made if it is not there.
        report: of `convert_to_relu`.
    """
    from matplotlib.figure import Figure  # not with the package: it takes half a second

    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_layers(left, report.layers)
    _draw_networks(right, report)
    return save_picture(figure, path, _DOTS_PER_INCH)


def _draw_layers(axis: "Axes", layers: Sequence[LayerRefit]) -> None:
    axis.set_title("Each layer: error on rows that were not fitted", fontsize=10, loc="left", pad=20)
    before, after = [_shown(layer.error_before) for layer in layers], [_shown(layer.error_after) for layer in layers]
    if not any(map(math.isfinite, [*before, *after])):
        _write(axis, "not measured:\ntoo few inputs for cross-validation")
        return
    places = list(range(1, len(layers) + 1))
    axis.vlines(places, after, before, color="#BBBBBB", linewidth=1.2, zorder=1)
    axis.plot(places, before, "o", color=_KEPT, markerfacecolor="white", markersize=6, label="weights kept")
    axis.plot(places, after, "o", color=_CHOSEN, markersize=5, label="as chosen")
    axis.set(yscale="log", xlabel="linear map, in forward order", ylabel="relative error (log scale)")
    axis.set_xticks(places if len(places) <= 16 else places[:: math.ceil(len(places) / 12)])
    _finish(axis)


def _shown(error: float | None) -> float:
    return error if error is not None and error > 0 and math.isfinite(error) else math.nan


def _draw_networks(axis: "Axes", report: ConversionReport) -> None:
    title, drawn = _series(report)
    axis.set_title(f"Whole network: {title}" if drawn else "Whole network", fontsize=10, loc="left", pad=20)
    if not drawn:
        _write(axis, "not measured:\nno inputs were held out")
        return
    names = _NETWORKS[-len(drawn[0][1]) :]  # a distance has no value for the original
    for row, ((label, marker, color), values) in enumerate(drawn):
        aside = (0.14, -0.14)[row] if len(drawn) > 1 else 0
        places = [place + aside for place in reversed(range(len(names)))]
        axis.plot(values, places, marker, color=color, markersize=6, label=label)
        for value, place in zip(values, places, strict=True):
            if not math.isfinite(value):
                continue  # there is no place for it
            text = score(title, value) if len(names) == len(_NETWORKS) else significant(value)
            axis.annotate(text, (value, place), xytext=(6, 0), textcoords="offset points", fontsize=8, va="center")
    axis.set_yticks(range(len(names)), names[::-1])
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.margins(x=0.45)  # room for the numbers beside the marks
    if len(names) < len(_NETWORKS) and not any(value <= 0 for _, values in drawn for value in values):
        axis.set_xscale("log")
    _finish(axis)


def _series(report: ConversionReport) -> tuple[str, list[tuple[tuple[str, str, str], list[float]]]]:
    """(what is drawn, [(look, values)]): the metric where one set has labels, and then no set without."""
    sets = zip(_SETS, (report.held_out, report.evaluation), strict=True)
    measured = [(look, *network_values(evaluation)) for look, evaluation in sets if evaluation is not None]
    measured.sort(key=lambda entry: -len(entry[2]))
    title = measured[0][1] if measured else ""
    return title, [(look, values) for look, name, values in measured if name == title]


def network_values(evaluation: Evaluation) -> tuple[str, list[float]]:
    """(what is drawn, its values): a metric of original, direct and refitted, or a distance of the latter two."""
    for name, original in evaluation.original_metrics.items():
        direct, refitted = evaluation.direct.metrics, evaluation.refitted.metrics
        if name in direct and name in refitted:
            return name, [original, direct[name], refitted[name]]
    if evaluation.direct.kl is not None and evaluation.refitted.kl is not None:
        return "KL to the original (nats)", [evaluation.direct.kl, evaluation.refitted.kl]
    return "relative error", [evaluation.direct.relative_error, evaluation.refitted.relative_error]


def _write(axis: "Axes", text: str) -> None:
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color="#666666", style="italic")
    axis.set_axis_off()


def _finish(axis: "Axes") -> None:
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0.2)
