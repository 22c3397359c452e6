"""The tables and the picture of a conversion's report, for its model card."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from hf_lgelu.comparing.distance import networks_table
from hf_lgelu.files import save_picture
from hf_lgelu.formats import NONE, markdown_table, percent, quoted, significant
from hf_lgelu.refit.report import ConversionReport, LayerRefit, evaluations

NET_NOTE = (
    "The plain swap has the new gates and the original weights. All but the scores by labels are measured against the "
    "original network, not against the truth."
)

_DOTS_PER_INCH = 130
# Okabe and Ito's colours, which stay apart for colour-blind readers.
_KEPT, _CHOSEN = "#D55E00", "#0072B2"


def whole_network(report: ConversionReport) -> str:
    """Both evaluations with their tables, and why one is missing."""
    parts = []
    if report.held_out is None:
        parts.append("No inputs were held out: too few were given.")
    for title, evaluation in evaluations(report):
        table = markdown_table(*networks_table(evaluation.original_metrics, evaluation.networks), text_columns=1)
        parts += [f"**On the {title}**: {evaluation.size_in_words}.", table]
    if report.evaluation is None:
        parts.append(
            "No second set was given. The held-out inputs are a part of the data. They do not show how far the network "
            "is from the original on other inputs."
        )
    return "\n\n".join([*parts, NET_NOTE] if evaluations(report) else parts)


def layer_table(layers: Sequence[LayerRefit]) -> str:
    """What was chosen for each linear map, and its error on rows that were not fitted, in forward order."""
    header = ["layer", "choice", "α", "error, weights kept", "error, as chosen", "live", "features", "rows", "note"]
    rows = []
    for layer in layers:
        errors = (significant(layer.error_before), significant(layer.error_after))
        strength = NONE if layer.strength is None else f"{layer.strength:g}"
        counts = (NONE if layer.live is None else percent(layer.live), f"{layer.width:,}", f"{layer.rows:,}")
        rows.append([quoted(layer.layers), layer.choice, strength, *errors, *counts, layer.note or ""])
    if not any(layer.note for layer in layers):
        for row in (header, *rows):
            del row[-1]
    return markdown_table(header, rows, text_columns=2)


def draw_conversion(path: str | os.PathLike, report: ConversionReport) -> Path:
    """The path of a PNG: each layer's relative error on rows that it was not fitted on, with its weights kept and as
    chosen, on a logarithmic axis."""
    from matplotlib.figure import Figure  # not with the package: it takes half a second

    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axis = figure.subplots()
    axis.set_title("Each layer: error on rows that were not fitted", fontsize=10, loc="left", pad=20)
    before, after = (
        [error if error is not None and 0 < error < math.inf else math.nan for error in errors]
        for errors in ([layer.error_before for layer in report.layers], [layer.error_after for layer in report.layers])
    )
    if any(map(math.isfinite, [*before, *after])):
        places = list(range(1, len(before) + 1))
        axis.vlines(places, after, before, color="#BBBBBB", linewidth=1.2, zorder=1)
        axis.plot(places, before, "o", color=_KEPT, markerfacecolor="white", markersize=6, label="weights kept")
        axis.plot(places, after, "o", color=_CHOSEN, markersize=5, label="as chosen")
        axis.set(yscale="log", xlabel="linear map, in forward order", ylabel="relative error (log scale)")
        axis.set_xticks(places if len(places) <= 16 else places[:: math.ceil(len(places) / 12)])
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0.2)
    else:
        text = "not measured:\ntoo few inputs for cross-validation"
        axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color="#666666", style="italic")
        axis.set_axis_off()
    return save_picture(figure, path, _DOTS_PER_INCH)
