"""A conversion's report for people: a Markdown page, and a few lines for a terminal."""

from collections import Counter

from hf_lgelu.refit.report import ConversionReport, Evaluation, LayerRefit
from hf_lgelu.refit.tables import layer_table, net_table, percent, score, significant

HELD_OUT = "inputs held out of the calibration set"
SECOND_SET = "second set"

LAYER_NOTE = (
    "The error is ‖ŷ − y‖² / ‖y − ȳ‖² on rows that the layer was not fitted on, where y is what the original network "
    "computes there and ŷ what the converted one does, with all layers before it already converted. α is the strength "
    "of the ridge, relative to the mean eigenvalue of the features' covariance."
)
NET_NOTE = (
    "The direct swap has ReLU gates and the original weights. KL and relative error are distances from the original "
    "network, not from the truth; 0 is the same."
)


def render_markdown(report: ConversionReport, *, figure: str | None = None) -> str:
    """The whole report as one Markdown page; `figure` is the picture's path, relative to the page."""
    parts = [f"# {report.model}: ReLU without training", what_was_done(report)]
    if report.warnings:
        parts += ["## Warnings", bullets(report.warnings)]
    parts += ["## The whole network", whole_network(report), "## The refitted layers"]
    if figure is not None:
        parts.append(f"![Error of each layer, and original, direct and refitted network]({figure})")
    parts += [layer_table(report.layers), LAYER_NOTE, "## What is still smooth", still_smooth(report)]
    if report.config_changes:
        parts += ["## Config", bullets(report.config_changes)]
    return "\n\n".join(parts) + "\n"


def what_was_done(report: ConversionReport) -> str:
    """Two sentences: which gates became ReLU, and on what the maps behind them were refitted."""
    duplicates = report.units - report.distinct_units
    without = f", {duplicates:,} duplicates left out" if duplicates else ""
    folds = (
        f"{report.folds}-fold cross-validation" if report.folds > 1 else "a fixed strength, without cross-validation"
    )
    return (
        f"{gates_in_words(report)} became ReLU. {choices_in_words(report.layers)}, without labels, on "
        f"{_count(report.distinct_units, 'input')} ({_count(report.rows, 'row')}{without}), by ridge regression "
        f"towards the weights they had, with {folds}. It took {report.seconds:.1f} s."
    )


def gates_in_words(report: ConversionReport) -> str:
    """ "12 gates (GELUActivation)", or "3 gates (2 GELUActivation, 1 SiLUActivation)"."""
    kinds = Counter(report.gates.values())
    names = [kind if len(kinds) == 1 else f"{count} {kind}" for kind, count in kinds.items()]
    return f"{_count(len(report.gates), 'gate')} ({', '.join(names)})"


def choices_in_words(layers: tuple[LayerRefit, ...]) -> str:
    """ "Of 5 linear maps behind them, 3 were refitted, 1 got another bias and 1 was kept"."""
    counts = Counter(layer.choice for layer in layers)
    words = [f"{counts['refit']} {'was' if counts['refit'] == 1 else 'were'} refitted"]
    if counts["bias only"]:
        words.append(f"{counts['bias only']} got another bias")
    if counts["kept"]:
        words.append(f"{counts['kept']} {'was' if counts['kept'] == 1 else 'were'} kept")
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"Of {len(layers)} linear map{'' if len(layers) == 1 else 's'} behind them, {listed}"


def whole_network(report: ConversionReport) -> str:
    """Both evaluations with their tables, and why one is missing."""
    parts = []
    if report.held_out is None:
        parts.append("No inputs were held out of the calibration set: that takes at least 64 rows of two inputs.")
    for title, evaluation in evaluations(report):
        parts += [f"**On the {title}**: {_size(evaluation)}.", net_table(evaluation)]
    if report.evaluation is None:
        parts.append(
            "No second set was given. Held-out inputs come from the calibration set, and cannot show that this set is "
            "unlike the inputs that the network will meet."
        )
    return "\n\n".join([*parts, NET_NOTE] if evaluations(report) else parts)


def evaluations(report: ConversionReport) -> list[tuple[str, Evaluation]]:
    """[(on what, evaluation)] of those that were made."""
    both = ((HELD_OUT, report.held_out), (SECOND_SET, report.evaluation))
    return [(title, evaluation) for title, evaluation in both if evaluation is not None]


def still_smooth(report: ConversionReport) -> str:
    """What the ReLU network still computes smoothly."""
    return bullets(report.smooth_calls) if report.smooth_calls else "No gate on the path of the inputs is smooth."


def bullets(lines: tuple[str, ...]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {' '.join(line.split())}" for line in lines)


def summarize(report: ConversionReport) -> str:
    """The report in a few lines of plain text."""
    lines = [f"{report.model}: {what_was_done(report)}"]
    lines += [f"  {_in_one_line(title, evaluation)}" for title, evaluation in evaluations(report)]
    kept = [name for layer in report.layers if layer.choice == "kept" for name in layer.layers]
    if kept:
        lines.append(f"  weights kept: {', '.join(kept)}")
    lines += [f"  warning: {warning}" for warning in report.warnings]
    lines += [f"  still smooth: {call}" for call in report.smooth_calls]
    return "\n".join(lines)


def _in_one_line(title: str, evaluation: Evaluation) -> str:
    direct, refitted = evaluation.direct, evaluation.refitted
    parts = [] if direct.kl is None else [f"KL {significant(direct.kl)} → {significant(refitted.kl)}"]
    if direct.kl is None:
        parts.append(f"relative error {significant(direct.relative_error)} → {significant(refitted.relative_error)}")
    else:
        parts.append(f"same prediction {percent(direct.agreement)} → {percent(refitted.agreement)}")
    what = "output" if direct.kl is None else "logit"
    parts.append(
        f"largest {what} change {significant(direct.max_logit_change)} → {significant(refitted.max_logit_change)}"
    )
    for name, value in evaluation.original_metrics.items():
        swapped, fitted = (score(name, change.metrics.get(name)) for change in (direct, refitted))
        parts.append(f"{name} {swapped} → {fitted}, {score(name, value)} as it was")
    return f"{title} ({_size(evaluation)}), direct swap → refitted: {'; '.join(parts)}"


def _size(evaluation: Evaluation) -> str:
    rows = _count(evaluation.rows, "prediction")
    return rows if evaluation.rows == evaluation.units else f"{rows} on {_count(evaluation.units, 'input')}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
