"""The refusal of a conversion by its result, and the warnings of its report."""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from hf_lgelu.formats import counted, quoted, significant
from hf_lgelu.models.config_keys import pretrained_roots, runtime_warnings
from hf_lgelu.models.record import VARIANT, has_record, loads_elsewhere, saved_without_gates
from hf_lgelu.networks.outputs import Outputs
from hf_lgelu.networks.rewrite import GATES_OF_CALLS, calls_of
from hf_lgelu.refit.config import ConversionConfig
from hf_lgelu.refit.folds import LEAST_ROWS_TO_HOLD_OUT, LEAST_SAMPLES_TO_HOLD_OUT
from hf_lgelu.refit.refusals import WHERE_NOT_FINITE, ConversionRefusedError
from hf_lgelu.refit.report import ENOUGH_ROWS, ConversionReport, Evaluation, LayerRefit, evaluations

_ENOUGH_TO_SPLIT = 2 * 8 * LEAST_SAMPLES_TO_HOLD_OUT
_ENOUGH_SAME_NEIGHBOURS = 0.9  # share of embeddings; below it a search finds other neighbours too often
_NOTHING = 1e-15  # a KL or a relative error that rounding alone makes: no other network is nearer
_ENOUGH_PREDICTIONS = 16  # with fewer, one changed prediction moves the agreement by over six points


def require_good(report: ConversionReport, model: nn.Module, config: ConversionConfig) -> None:
    """Raise ConversionRefusedError, with `report` and `model`, for a network that the options do not accept.

    The error gives the first reason of: outputs not finite, no nearer than the plain swap, beyond `max_kl`.
    """
    reason = None
    advice = "give more inputs, from where the model is used"
    if alone := [site for layer in report.layers if layer.is_unfit for site in layer.sites]:
        advice += f", or leave gates smooth (`keep`) that no map after them makes up for: {', '.join(alone[:4])}"
    if report.held_out is not None and (failed := _why_not_nearer(report.held_out, advice)) is not None:
        reason = f"on {report.held_out.rows:,} rows that were held out, {failed}"
    elif config.strict:
        measured = [(evaluation.refitted, title) for title, evaluation in evaluations(report)]
        farthest, title = max(measured, key=lambda each: each[0].value, default=(None, ""))
        bound, advice = config.max_kl, "give more inputs, or train the model with hardening"
        if farthest is None:
            far = "nothing was held out, no second set was given, and no distance was measured"
            reason = f"{far}: `strict` wants a measured distance; {advice}"
        elif bound is not None and farthest.value > bound:
            far = f"on the {title} the network is {farthest.in_words} away from the original"
            reason = f"{far}: `strict` wants a distance of at most max_kl = {bound:g}; {advice}"
    if reason is not None:
        raise ConversionRefusedError(f"{reason}. The model is as it was", report, model)


def _why_not_nearer(evaluation: Evaluation, advice: str) -> str | None:
    """The reason, with `advice`, why outputs are refused: not finite, or no nearer than the plain swap's; else None."""
    direct, refitted = evaluation.direct, evaluation.refitted
    if not math.isfinite(refitted.value):
        return f"the outputs are not finite: {WHERE_NOT_FINITE}"
    # Lists compare by their first difference. An output that no map comes before is as far as the swap's: then the next
    # farthest decides.
    if refitted.by_output < direct.by_output or refitted.value < _NOTHING:
        return None
    return (
        f"the converted network is no nearer to the original ({refitted.in_words}) than the plain swap "
        f"({direct.in_words}); {advice}"
    )


def conversion_warnings(report: ConversionReport, max_kl: float | None) -> Iterator[str]:
    """Warnings of missing checks, of large distances, of starved layers and of gates without a refit."""
    yield from _of_what_was_held_out(report)
    for title, evaluation in evaluations(report):
        refitted = evaluation.refitted
        if max_kl is None or not math.isfinite(refitted.value):
            continue
        is_far = max_kl < refitted.value
        if refitted.embedding and (is_far or refitted.embedding.get("same_neighbour", 1.0) < _ENOUGH_SAME_NEIGHBOURS):
            *_, (measure, shown) = refitted.main_measures.items()
            yield (
                f"on the {title} the embeddings are far from the original's ({measure} {shown}): try your search or "
                "clustering with them before you use them"
            )
        elif is_far:
            yield (
                f"on the {title} the converted network is {refitted.in_words} away from the original, beyond max_kl = "
                f"{max_kl:g}: measure what that costs before you use it"
            )
    change = report.held_out.refitted if report.held_out is not None and report.outputs == ("",) else None
    # Softmax does not see an amount that is common to all columns.
    if change and change.kl is not None and change.relative_error > 0.01 and change.kl < 1e-3 * change.relative_error:
        yield (
            f"the unnamed output was taken for class scores (KL {significant(change.kl)} nat). If it holds values (a "
            f"regression, an image), its relative error of {significant(change.relative_error)} (share of squares) "
            'counts: let the model return {"values": output}, or {"embeddings": output}'
        )
    yield from _of_layers(report)
    if report.evaluation is None:
        return
    if report.repeated:
        yield (
            f"{report.repeated:,} of {report.evaluation.samples:,} samples of the second set were given to fit on as "
            "well: for these, the result says nothing about unseen inputs"
        )
    advice = "the data that was fitted on is probably not from where that set is"
    if (failed := _why_not_nearer(report.evaluation, advice)) is not None:
        yield f"on the second set {failed}"


def _of_what_was_held_out(report: ConversionReport) -> Iterator[str]:
    if report.held_out is None:
        few, more = "are too few", "64 or more, of several inputs, at best several times the width of the widest layer"
        if report.rows >= LEAST_ROWS_TO_HOLD_OUT:
            few, more = f"are of too few distinct inputs ({report.distinct_samples})", "16 inputs or more"
        yield (f"{report.rows} rows {few} to hold some out: the strength is fixed and nothing was checked; give {more}")
        return
    if report.evaluation is None and report.held_out.rows < _ENOUGH_PREDICTIONS:
        yield (
            f"held out: only {report.held_out.size_in_words}, too few to trust the distance to the original; give more "
            "inputs (an eighth is held out), or a second set (`evaluation_data`)"
        )
    if len(report.steps) > 1 and not report.choosing_samples and report.evaluation is None:
        yield (
            f"held out were only {counted(report.held_out.samples, 'input')}: the same inputs chose the rung and "
            f"measured the distance, and other inputs are probably further away; give {_ENOUGH_TO_SPLIT} or more (an "
            "eighth is held out), or a second set (`evaluation_data`)"
        )


def _of_layers(report: ConversionReport) -> Iterator[str]:
    layers, samples = report.layers, report.distinct_samples
    starved = [layer for layer in layers if layer.is_starved]
    if starved:
        fitted = sum(layer.rows > 0 for layer in layers)
        worst = min(starved, key=lambda layer: layer.rows / layer.width)
        enough = math.ceil(samples * ENOUGH_ROWS * worst.width / worst.rows)
        # Where all inputs were used, no option brings more; how many more there are is not known here.
        option = (
            "" if report.config.get("max_samples") is None else " (`max_samples` reads more of those that you have)"
        )
        yield (
            f"{len(starved)} of {fitted} layers are starved, with fewer than {ENOUGH_ROWS} rows a feature (most of all "
            f"{worst.layers[0]}: {worst.rows:,} rows, {worst.width:,} features): give {enough:,} inputs like these "
            f"{samples:,}{option}"
        )
    unfit = [layer for layer in layers if layer.is_unfit]
    for layer in unfit[:3]:
        more = f"; so are {len(unfit) - 3} more" if len(unfit) > 3 and layer is unfit[2] else ""
        reason = str(layer.note).removeprefix("not refitted: ")
        yield f"{', '.join(layer.sites[:4])}: only the gate was exchanged: {reason}{more}"


def own_text_warning(text: Tensor) -> str:
    """The warning that a language model got no data and sampled the text itself."""
    return (
        f"no data were given: the model sampled {text.numel():,} tokens of text itself, and all is fitted "
        "and measured on these. Text from where the model is used tells more (`evaluation_data`)"
    )


def unread_warning(layers: Sequence[LayerRefit], outputs: Outputs) -> Iterator[str]:
    """A warning of gates without a refit, because they lead only to outputs that did not count."""
    names = [layer.layers[0] for layer in layers if layer.is_unread]
    if names:
        others = f" ({quoted(outputs.left_out)})" if outputs.left_out else ""
        yield (
            f"outputs that depend on {quoted(names)} did not count{others}: the weights on the way to them stayed, and "
            "their new values were not measured. Name the ones that you use in `outputs`, together with "
            f"{quoted(outputs.tensors)}, or keep the gates (`keep`)"
        )


def config_warnings(model: nn.Module, changes: Sequence[str]) -> Iterator[str]:
    """Warnings of programs that ignore the config, new heads, configs without a key, and code with old gates."""
    yield from runtime_warnings(model) if changes else ()
    for _, root in pretrained_roots(model):
        name, trained = type(root).__name__, getattr(root.config, "architectures", None)
        if trained and name not in trained and not root.can_generate() and root.base_model is not root:
            yield (
                f"the checkpoint is of a {trained[0]}: unless the head of this {name} was trained since, its scores "
                "do not show how far the network is. Train the head first, or convert the network without it"
            )
        if has_record(root.config):
            outer = model if hasattr(model, "transformers_model") else root  # sentence-transformers loads its own
            elsewhere = "ends in an error that names this function"
            if loads_elsewhere(root.config):
                elsewhere = (
                    "gives the old gates, another network, without an error, unless the folder was saved with "
                    f"variant={VARIANT!r}, as hf-lgelu saves it"
                )
            yield (
                f"{name} has no config key that says these gates, so the config remembers them, and the saved folder "
                f"needs hf_lgelu: load it by hf_lgelu.from_pretrained({type(outer).__name__}, folder). Any other load "
                f"{elsewhere}"
            )
    yield from saved_without_gates(model)
    lines = dict.fromkeys(
        f"{call.where}: {call.function}"
        for module in model.modules()
        for number, call in enumerate(calls_of(module))
        if module.get_submodule(f"{GATES_OF_CALLS}.{number}")._get_name() != call.function
    )
    if lines:
        yield (
            f"the code still calls the old gates: {'; '.join(lines)}. This copy runs the new gates instead. Before you "
            "load the state dict into the code yourself, write the new gate there (torch.nn.functional.relu for ReLU): "
            "code without this edit computes the old gates, without an error"
        )
