"""When a conversion is refused, and what its report warns of."""

import math
from collections.abc import Iterator, Sequence

from torch import nn

from hf_lgelu.formats import counted, quoted, significant
from hf_lgelu.models.batches import Batch
from hf_lgelu.models.config_keys import pretrained_roots
from hf_lgelu.models.example_run import run_example
from hf_lgelu.models.outputs import task_outputs, uncounted_outputs
from hf_lgelu.models.runtimes import runtime_warnings
from hf_lgelu.models.sites import ActivationSite
from hf_lgelu.refit.config import ConversionConfig
from hf_lgelu.refit.folds import LEAST_ROWS_TO_HOLD_OUT
from hf_lgelu.refit.layers import find_layers
from hf_lgelu.refit.program import Program
from hf_lgelu.refit.report import ENOUGH_ROWS, ConversionReport, Evaluation, LayerRefit, NetChange, evaluations
from hf_lgelu.refit.wording import how_far, rungs_in_words

_ENOUGH_TO_JUDGE = 64  # inputs held out; over fewer, distillation has passed that was further off elsewhere
_ENOUGH_PREDICTIONS = 16  # of fewer, one that changes moves the share of equal ones by over six points


WHERE_NOT_FINITE = (
    "look for NaN or infinities in the data and in the weights; weights in float16, which ends at 65,504, want "
    "model.float()"
)
"""What to do where numbers are not finite."""


class ConversionRefusedError(RuntimeError):
    """The model was not converted; the given one is as it was.

    `report` says what was measured, where anything was, and `model` is then the converted network that was refused.

    >>> import torch
    >>> from hf_lgelu import ConversionConfig, ConversionRefusedError, convert_to_relu
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    >>> try:
    ...     convert_to_relu(net, torch.randn(200, 4), options=ConversionConfig(max_kl=1e-12, strict=True))
    ... except ConversionRefusedError as error:
    ...     print(error.report.held_out.refitted.kl > 1e-12)
    True
    """

    def __init__(self, message: str, report: ConversionReport | None = None, model: nn.Module | None = None) -> None:
        super().__init__(message)
        self.report, self.model = report, model


def conversion_warnings(report: ConversionReport, max_kl: float | None) -> Iterator[str]:
    """What a user of the result must know: what could not be checked, what is far or starved, what was left."""
    yield from _of_what_was_held_out(report)
    for title, evaluation in evaluations(report):
        if max_kl is not None and max_kl < evaluation.refitted.distance < math.inf:
            yield (
                f"on the {title} the converted network is {evaluation.refitted.in_words} away from the "
                f"original, beyond max_kl = {max_kl:g}: measure what that costs before you use it"
            )
    if report.outputs == ("",) and report.held_out is not None and _hides_an_error(report.held_out.refitted):
        change = report.held_out.refitted
        yield (
            f"the output is a tensor without a name and was taken for class scores, of which only the shares that "
            f"softmax makes count (KL {significant(change.kl)} nat). Should it be values (a regression, an "
            f"embedding, an image), its relative error of {significant(change.relative_error)} is what "
            'counts: convert a model that gives them by a name of their own, {"values": output}'
        )
    yield from _of_layers(report.layers)
    if report.evaluation is not None:
        yield from _of_the_second_set(report, report.evaluation)


def _of_what_was_held_out(report: ConversionReport) -> Iterator[str]:
    if report.held_out is None:
        few = "are too few"
        if report.rows >= LEAST_ROWS_TO_HOLD_OUT:
            few = f"are of too few distinct inputs ({report.distinct_units})"
        yield (
            f"{report.rows} rows {few} to hold some out: the strength is fixed and nothing was checked; give 64 or "
            "more, of several inputs, at best several times the width of the widest layer"
        )
        return
    if report.folds == 1:
        yield (
            f"{report.distinct_units} distinct inputs are too few for four folds beside what is held out: the strength "
            "is fixed; give more"
        )
    if report.evaluation is None and report.held_out.rows < _ENOUGH_PREDICTIONS:
        yield (
            f"judged on {counted(report.held_out.rows, 'prediction')} alone: what is said of the distance to the "
            "original is a guess; give more inputs (an eighth is held out), or a second set (evaluation_data, "
            "--evaluation)"
        )
    is_distilled = any(step.effort == "distill" and step.is_kept for step in report.steps)
    if is_distilled and report.evaluation is None and report.held_out.units < _ENOUGH_TO_JUDGE:
        yield (
            f"distilled, and judged on {report.held_out.units} inputs held out: the mean over so few can fall where "
            "other inputs are further off for it; give more (an eighth is held out), or a second set "
            "(evaluation_data, --evaluation)"
        )


def _of_layers(layers: Sequence[LayerRefit]) -> Iterator[str]:
    starved = [layer for layer in layers if layer.is_starved]
    if starved:
        fitted = sum(layer.rows > 0 for layer in layers)
        worst = min(starved, key=lambda layer: layer.rows / layer.width)
        yield (
            f"{len(starved)} of {fitted} layers are starved, fitted on fewer than {ENOUGH_ROWS} rows a feature "
            f"(most of all {worst.layers[0]}: {worst.rows:,} rows, {worst.width:,} features); give more inputs"
        )
    yield from (f"{layer.layers[0]}: {layer.note}" for layer in layers if layer.is_unfit)
    beside = [layer.layers[0] for layer in layers if layer.is_beside]
    if beside:
        yield (
            f"{quoted(beside)} had weights behind it that were left as they were, in a part of the model whose outputs "
            "did not count: what that gives now was not measured. Name its output (outputs=), or leave it (keep=)"
        )


def _of_the_second_set(report: ConversionReport, second: Evaluation) -> Iterator[str]:
    if report.repeated:
        yield (
            f"{report.repeated:,} of {second.units:,} units of the second set were given to fit on as well: of these "
            "it says nothing on inputs that the network has not seen"
        )
    if not math.isfinite(second.refitted.distance):
        yield f"on the second set the outputs are not finite: {WHERE_NOT_FINITE}"
    elif not second.refitted.distance < second.direct.distance:
        yield (
            "on the second set the refit is no nearer to the original than the direct swap: the data that was fitted "
            "on is probably not from where that set is"
        )


def uncounted_warnings(
    model: nn.Module, sites: Sequence[ActivationSite], batch: Batch, layers: Sequence[LayerRefit]
) -> Iterator[str]:
    """Of maps behind gates that count, on ways to outputs that do not: they were not refitted, as `layers` say.

    Heads of which no gate counts are told by their gates. A second trace finds the maps, where there are such outputs.
    """
    output = run_example(model, batch.inputs)
    counted, others = list(task_outputs(output)), list(uncounted_outputs(output))
    if not others:
        return
    of_all = lambda output: list((task_outputs(output) | uncounted_outputs(output)).values())  # noqa: E731
    program = Program(model, sites, batch.inputs, of_all)
    beside = {name for layer in layers if layer.is_beside for name in layer.sites}
    known = {name for layer in layers for name in layer.layers}
    kept = [
        consumer.name
        for layer in find_layers(program, model, sites).layers
        if not beside.issuperset(sites[index].name for index in layer.sites)
        for consumer in layer.maps
        if consumer.name not in known
    ]
    if kept:
        yield (
            f"of the outputs {quoted(others)} did not count, and {quoted(kept)} behind gates on the way there kept the "
            f"weights: what these give now was not measured. Name what you use of them in outputs=, beside "
            f"{quoted(counted)}"
        )


def config_warnings(model: nn.Module, changes: Sequence[str], rewrite_config: bool) -> Iterator[str]:
    """What becomes of the result elsewhere: programs that ignore its config, and a config that was left as it is."""
    if changes:
        yield from runtime_warnings(getattr(model, "config", None))
    for _, root in () if rewrite_config else pretrained_roots(model):
        yield (
            f"rewrite_config=False: the config of {type(root).__name__} names the gates from before. Saved and loaded "
            "by it, these stand before the refitted weights, another network, without an error; load the weights into "
            "a model that has been given the gates of this one"
        )


def _hides_an_error(change: NetChange) -> bool:
    """Whether the outputs moved by an amount, common to all columns, that softmax does not see."""
    return change.kl is not None and change.relative_error > 0.01 and change.kl < 1e-3 * change.relative_error


def require_good(report: ConversionReport, model: nn.Module, config: ConversionConfig) -> None:
    """Raise ConversionRefusedError, with both arguments, for a network that is not what was asked for."""
    reason = _not_finite(report) or _no_better(report)
    if reason is None and config.tolerance is not None:
        reason = _not_reached(report, config, config.tolerance)
    if reason is None and config.strict:
        reason = _not_near(report, config.max_kl)
    if reason is not None:
        raise ConversionRefusedError(f"{reason}. The model is as it was", report, model)


def _not_finite(report: ConversionReport) -> str | None:
    if report.held_out is None or math.isfinite(report.held_out.refitted.distance):
        return None
    return f"on {report.held_out.rows:,} rows that were held out, the outputs are not finite; {WHERE_NOT_FINITE}"


def _no_better(report: ConversionReport) -> str | None:
    """Whether the refit is no nearer to the original than the direct swap, on what was held out."""
    if report.held_out is None:
        return None
    direct, refitted = report.held_out.direct, report.held_out.refitted
    if refitted.distance < direct.distance or refitted.distance == direct.distance == 0:
        return None
    return (
        f"on {report.held_out.rows:,} rows that were held out, the refitted network is no nearer to the original "
        f"({refitted.in_words}) than the direct swap ({direct.in_words}); give more inputs, "
        "from where the model is used"
    )


def _not_near(report: ConversionReport, max_kl: float | None) -> str | None:
    """Whether the network is further from the original than the bound on any set, or on none was measured."""
    measured = [evaluation.refitted for _, evaluation in evaluations(report)]
    if measured and (max_kl is None or all(change.distance <= max_kl for change in measured)):
        return None
    return (
        f"{how_far(report)} strict=True wants a measured distance"
        + ("" if max_kl is None else f" of at most max_kl = {max_kl:g}")
        + "; give more inputs, or train the model with hardening"
    )


def _not_reached(report: ConversionReport, config: ConversionConfig, tolerance: float) -> str | None:
    """Whether no rung of the ladder came as near to the original as was asked for; what these options allow beside."""
    best = next((step for step in reversed(report.steps) if step.is_kept), None)
    if best is not None and best.gap is not None and best.gap <= tolerance:
        return None
    what = "lose at most {:g} of the original's score" if best and best.lost is not None else (
        "be within {:g} of the original on the inputs held out"
    )  # fmt: skip
    advice = ["more inputs"]
    if config.gate.can_be_placed:
        advice.append("a width above 1" if report.width_share == 1 else "a larger width")
    untried = set(config.rungs) - {step.effort for step in report.steps}
    if any(step.gap is None for step in report.steps) or (config.max_seconds is not None and untried):
        advice.append("more seconds")
    elif report.next_step is not None:
        advice.append(f"effort={report.next_step[0]!r}")
    keep = "keep some gates, " if len(report.gates) > 1 else ""
    return (
        f"the network was to {what.format(tolerance)}; the nearest was {significant(best.gap if best else None)} "
        f"({rungs_in_words(report)}). Give {' or '.join(advice)}, {keep}or train the model with hardening"
    )
