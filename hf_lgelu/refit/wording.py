"""A conversion's report in sentences, and all of it in a few lines of plain text."""

import math
from collections import Counter
from collections.abc import Sequence

from hf_lgelu.formats import counted, percent, quoted, score, significant
from hf_lgelu.refit.report import ConversionReport, Evaluation, LayerRefit, StepTaken, evaluations

_ROUNDING = 1e-10  # KL or relative error; what float32 leaves of two equal networks lies below


def summarize(report: ConversionReport) -> str:
    """The report in a few lines of plain text."""
    lines = [f"{report.model}: {how_far(report)}", f"  {what_was_done(report)}"]
    lines += [f"  {_in_one_line(title, evaluation)}" for title, evaluation in evaluations(report)]
    kept = [name for layer in report.layers if layer.choice == "kept" for name in layer.maps]
    if kept:
        lines.append(f"  weights kept: {', '.join(kept)}")
    lines += [f"  {line}" for line in rest_of_the_gap(report)]
    lines += [f"  warning: {warning}" for warning in report.warnings]
    lines += [f"  still smooth: {call}" for call in report.smooth_calls]
    return "\n".join(lines)


def how_far(report: ConversionReport) -> str:
    """What matters first: how far the network is from the original, on the second set if there is one."""
    measured = evaluations(report)
    if not measured:
        return "How far it is from the original was not measured: nothing was held out, and no second set given."
    title, evaluation = measured[-1]
    change = evaluation.refitted
    parts = [
        f"{name} {score(name, change.metrics.get(name))}, the original's {score(name, value)}"
        for name, value in evaluation.original_metrics.items()
    ]
    parts.append(f"{change.in_words} from the original")
    if change.kl is not None:
        parts.append(f"{percent(change.agreement)} of the predictions the same")
    return f"On the {title} ({predictions_counted(evaluation)}): {'; '.join(parts)}."


def what_was_done(report: ConversionReport) -> str:
    """What the gates became, on what the maps behind them were refitted, and what was tried beside."""
    duplicates = report.units - report.distinct_units
    without = f", {duplicates:,} duplicates left out" if duplicates else ""
    folds = (
        f"a strength chosen on {report.folds} folds"
        if report.folds > 1
        else "a fixed strength, without cross-validation"
    )
    apart = "" if report.held_out is None else f"; {counted(report.held_out.units, 'input')} of them held out"
    sentences = [f"{gates_in_words(report)} became {report.target}."]
    if report.kept:
        stayed = ", ".join(f"`{name}` ({kind})" for name, kind in report.kept.items())
        sentences.append(f"{counted(len(report.kept), 'gate')} stayed smooth: {stayed}.")
    sentences.append(
        f"{choices_in_words(report.layers)}, without labels, on {counted(report.distinct_units, 'input')} "
        f"({counted(report.rows, 'row')}{apart}{without}), by ridge regression towards the weights they had, with "
        f"{folds}."
    )
    if report.outputs != ("",):
        sentences.append(f"Of the model's outputs {quoted(report.outputs)} counted.")
    if len(report.steps) > 1:  # of the refit alone there is nothing to say
        tried = rungs_in_words(report)
        sentences.append(f"Tried one after the other, with their distance on the inputs held out: {tried}.")
        if report.width_share != 1:
            sentences.append(f"Its blocks have {report.width_share:.4g} times the units.")
    return " ".join([*sentences, f"It took {report.seconds:.1f} s."])


def rungs_in_words(report: ConversionReport) -> str:
    """ "refit 0.21, place 0.13, distill 0.14 (not kept)"."""
    kept = [step for step in report.steps if step.is_kept]
    return ", ".join(_step_in_words(step, kept) for step in report.steps)


def _step_in_words(step: StepTaken, kept: Sequence[StepTaken]) -> str:
    lost = "" if step.lost is None else f" with {max(step.lost, 0.0):.2%} of the score lost".replace("%", " %")
    return f"{step.effort} {significant(step.distance)}{lost}{'' if step.is_kept else _why_not_kept(step, kept)}"


def _why_not_kept(step: StepTaken, kept: Sequence[StepTaken]) -> str:
    if step.gap is None:
        return " (out of time)"
    # What was kept behind it is nearer than what was before.
    is_near = all(step.gap < other.gap for other in kept if other.gap is not None)
    return " (not kept: nearer on too few)" if is_near else " (not kept)"


def gates_in_words(report: ConversionReport) -> str:
    """ "12 gates (GELUActivation)", or "3 gates (2 GELUActivation, 1 SiLUActivation)"."""
    kinds = Counter(report.gates.values())
    names = [kind if len(kinds) == 1 else f"{count} {kind}" for kind, count in kinds.items()]
    return f"{counted(len(report.gates), 'gate')} ({', '.join(names)})"


def choices_in_words(layers: tuple[LayerRefit, ...]) -> str:
    """ "Of 5 linear maps behind them, 3 were refitted, 1 got another bias and 1 was kept"."""
    counts = Counter(layer.choice for layer in layers for _ in layer.maps)
    words = [f"{counts['refit']} {'was' if counts['refit'] == 1 else 'were'} refitted"]
    if counts["bias only"]:
        words.append(f"{counts['bias only']} got another bias")
    if counts["kept"]:
        words.append(f"{counts['kept']} {'was' if counts['kept'] == 1 else 'were'} kept")
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"Of {counted(counts.total(), 'linear map')} behind them, {listed}"


def rest_of_the_gap(report: ConversionReport) -> tuple[str, ...]:
    """What may take some of it away; () where nothing was held out, or is left, or what is left is not finite."""
    is_left = report.held_out is not None and _ROUNDING <= report.held_out.refitted.distance < math.inf
    if report.next_step is None or not is_left:
        return ()
    effort, seconds = report.next_step
    return (f"The next rung, `{effort}`, may take about {seconds:.0f} s.",)


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
    return f"{title} ({predictions_counted(evaluation)}), direct swap → refitted: {'; '.join(parts)}"


def predictions_counted(evaluation: Evaluation) -> str:
    """On how many predictions it was measured, in words."""
    rows = counted(evaluation.rows, "prediction")
    return rows if evaluation.rows == evaluation.units else f"{rows} on {counted(evaluation.units, 'input')}"
