"""A conversion's report as a Markdown page, and its tables, which the model card has too."""

from collections.abc import Mapping, Sequence

from hf_lgelu.formats import NONE, markdown_table, percent, quoted, score, significant
from hf_lgelu.refit.report import ConversionReport, Evaluation, LayerRefit, NetChange, evaluations
from hf_lgelu.refit.wording import how_far, predictions_counted, rest_of_the_gap, what_was_done

LAYER_NOTE = (
    "The error is ‖ŷ − y‖² / ‖y − ȳ‖² on rows that the layer was not fitted on, where y is what the original network "
    "computes there and ŷ what the converted one does, with all layers before it already converted. α is the strength "
    "of the ridge, relative to the mean variance of the features (a few huge ones apart)."
)

NET_NOTE = (
    "The direct swap has the new gates and the original weights. KL and relative error are distances from the original "
    "network, not from the truth; 0 is the same."
)


def render_markdown(report: ConversionReport, *, figure: str | None = None) -> str:
    """The whole report as one Markdown page; `figure` is the picture's path, relative to the page."""
    parts = [f"# {report.model}: {report.target} without training", how_far(report), what_was_done(report)]
    if report.warnings:
        parts += ["## Warnings", bullets(report.warnings)]
    parts += ["## The whole network", whole_network(report), "## The refitted layers"]
    if figure is not None:
        parts.append(f"![Error of each layer, and original, direct and refitted network]({figure})")
    parts += [layer_table(report.layers), LAYER_NOTE]
    rest = rest_of_the_gap(report)
    parts += ["## The rest of the distance", bullets(rest)] if rest else []
    parts += ["## What is still smooth", still_smooth(report)]
    if report.config_changes:
        parts += ["## Config", bullets(report.config_changes)]
    return "\n\n".join(parts) + "\n"


def whole_network(report: ConversionReport) -> str:
    """Both evaluations with their tables, and why one is missing."""
    parts = []
    if report.held_out is None:
        parts.append("No inputs were held out: that takes at least 64 rows of two inputs.")
    for title, evaluation in evaluations(report):
        parts += [f"**On the {title}**: {predictions_counted(evaluation)}.", net_table(evaluation)]
        if evaluation.refitted.relative_errors:
            parts.append(output_table(evaluation))
    if report.evaluation is None:
        parts.append(
            "No second set was given. Held-out inputs come from the data that was fitted on, and cannot show that this "
            "is unlike the inputs that the network will meet."
        )
    return "\n\n".join([*parts, NET_NOTE] if evaluations(report) else parts)


def still_smooth(report: ConversionReport) -> str:
    """What the converted network still computes smoothly."""
    return bullets(report.smooth_calls) if report.smooth_calls else "No gate on the path of the inputs is smooth."


def bullets(lines: tuple[str, ...]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {' '.join(line.split())}" for line in lines)


def net_table(evaluation: Evaluation) -> str:
    """Original, direct swap and refitted network on the same rows, a line each."""
    metrics = list(evaluation.original_metrics)
    header = ("network", "KL to the original (nats)", "same prediction", "largest logit change", "relative error")
    original = ("original", "0", "100 %", "0", "0", *_scores(evaluation.original_metrics, metrics))
    rows = [
        original,
        *(
            (name, *_change(change), *_scores(change.metrics, metrics))
            for name, change in (("direct swap", evaluation.direct), ("refitted", evaluation.refitted))
        ),
    ]
    return markdown_table((*header, *metrics), rows, text_columns=1)


def output_table(evaluation: Evaluation) -> str:
    """The relative error of every output that counts, where there are several."""
    direct, refitted = evaluation.direct.relative_errors, evaluation.refitted.relative_errors
    rows = [(f"`{name}`", significant(direct[name]), significant(refitted[name])) for name in refitted]
    return markdown_table(("output", "relative error, direct swap", "refitted"), rows, text_columns=1)


def layer_table(layers: Sequence[LayerRefit]) -> str:
    """What was chosen for each linear map, and its error on rows that were not fitted, in forward order."""
    header = ["layer", "choice", "α", "error, weights kept", "error, as chosen", "features", "rows", "note"]
    rows = []
    for layer in layers:
        errors = (significant(layer.error_before), significant(layer.error_after))
        strength = NONE if layer.strength is None else f"{layer.strength:g}"
        counts = (f"{layer.width:,}", f"{layer.rows:,}")
        rows.append([quoted(layer.layers), layer.choice, strength, *errors, *counts, layer.note or ""])
    if not any(layer.note for layer in layers):
        for row in (header, *rows):
            del row[-1]
    return markdown_table(header, rows, text_columns=2)


def _change(change: NetChange) -> tuple[str, str, str, str]:
    return (
        significant(change.kl),
        NONE if change.kl is None else percent(change.agreement),  # no logits, no choice between classes
        significant(change.max_logit_change),
        significant(change.relative_error),
    )


def _scores(metrics: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [score(name, metrics.get(name)) for name in names]
