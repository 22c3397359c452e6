"""The numbers of a conversion as Markdown tables, for its report and its model card."""

from collections.abc import Iterable, Mapping, Sequence

from hf_lgelu.refit.report import Evaluation, LayerRefit, NetChange

NONE = "–"
"""Where a number does not apply, or was not measured. Never a zero."""

_DIGITS = {"accuracy": 4, "perplexity": 2}


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


def layer_table(layers: Sequence[LayerRefit]) -> str:
    """What was chosen for each linear map, and its error on rows that were not fitted, in forward order."""
    noted = any(layer.note for layer in layers)
    header = ("layer", "choice", "α", "error, weights kept", "error, as chosen", "features", "rows")
    rows = []
    for layer in layers:
        errors = (significant(layer.error_before), significant(layer.error_after))
        strength = NONE if layer.strength is None else f"{layer.strength:g}"
        row = (_names(layer.layers), layer.choice, strength, *errors, f"{layer.width:,}", f"{layer.rows:,}")
        rows.append((*row, layer.note or "") if noted else row)
    return markdown_table((*header, "note") if noted else header, rows, text_columns=2)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int) -> str:
    """A table whose first columns are words; the others are numbers, on the right."""
    lines = [f"| {' | '.join(header)} |"]
    lines.append("|" + "".join(" --- |" if i < text_columns else " ---: |" for i in range(len(header))))
    lines += [f"| {' | '.join(map(escaped, row))} |" for row in rows]
    return "\n".join(lines)


def score(metric: str, value: float | None) -> str:
    """A score with the digits that fit the metric."""
    return NONE if value is None else f"{value:.{_DIGITS.get(metric, 4)}f}"


def significant(value: float | None) -> str:
    """Three significant digits."""
    return NONE if value is None else f"{value:.3g}"


def percent(fraction: float) -> str:
    """A share of predictions; 99.996 % must not be read as all of them."""
    return "100 %" if fraction == 1 else f"{min(fraction, 0.9999):.2%}".replace("%", " %")


def escaped(text: str) -> str:
    """`text` in a cell: on one line, without what would end the cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def _change(change: NetChange) -> tuple[str, str, str, str]:
    return (
        significant(change.kl),
        NONE if change.kl is None else percent(change.agreement),  # no logits, no choice between classes
        significant(change.max_logit_change),
        significant(change.relative_error),
    )


def _scores(metrics: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [score(name, metrics.get(name)) for name in names]


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
