"""A trained smooth network as a ReLU network, in seconds and without training.

Every smooth gate becomes ReLU, and the linear maps behind the gates are refitted, layer by layer, by ridge regression
towards their own weights on a few thousand unlabelled inputs: features of the network under way, targets of the
original.
"""

import copy
import functools
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from accelerate import PartialState
from torch import nn
from tqdm.auto import tqdm

from hf_lgelu.models.example_run import evaluation_mode
from hf_lgelu.models.runtimes import runtime_warnings
from hf_lgelu.models.sites import SMOOTH_KINDS, ActivationSite, check_kinds, find_sites
from hf_lgelu.models.smooth_calls import find_smooth_calls
from hf_lgelu.models.surgery import SurgeryReport, TemporaryRelu, operable_module, substitute_relu
from hf_lgelu.refit.batches import Batch, for_decoder, read_batches, taken_by
from hf_lgelu.refit.carry import Carrier
from hf_lgelu.refit.compare import evaluate_conversion, main_output
from hf_lgelu.refit.folds import LEAST_ROWS_TO_HOLD_OUT, Folds, cut_batches, deal_folds, known_processes
from hf_lgelu.refit.layers import Layer, Layers
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.report import ConversionReport, Evaluation, LayerRefit, NetChange
from hf_lgelu.refit.ridge import NotFiniteError, RidgeFit, fit_ridge
from hf_lgelu.refit.weights import write_refit
from hf_lgelu.refit.widen import Preparation


class Conversion(NamedTuple):
    """What `convert_to_relu` gives: the new model, and what was done."""

    model: nn.Module
    report: ConversionReport


class ConversionRefusedError(RuntimeError):
    """The model was not converted. `report` says what was measured, where anything was; the model is as it was."""

    def __init__(self, message: str, report: ConversionReport | None = None) -> None:
        super().__init__(message)
        self.report = report


def convert_to_relu(
    model: nn.Module,
    data: Any,
    *,
    evaluation_data: Any = None,
    batch_size: int | None = None,
    collate: Callable[[Any], Any] | None = None,
    max_units: int | None = None,
    kinds: Sequence[str] = SMOOTH_KINDS,
    allow_unrefitted: bool = False,
    rewrite_config: bool = True,
    progress: bool = False,
) -> Conversion:
    """The same architecture with ReLU gates and refitted weights; `model` stays as it is.

    From 64 distinct rows on, a part is held out, and the refit must be nearer to the original there than the direct
    swap. Rows must come from where the model will be used: that they do cannot be seen from the rows themselves, so
    give a second set as `evaluation_data`. In a process group (`accelerate launch`) the work is shared, every process
    must call, and each gets the same model.

    Args:
        model: trained, any module whose gates are modules: families of transformers, timm, your own. Refitted are the
            first linear maps behind each gate: Linear, Conv1D, convolutions with any stride and groups, the joint
            ones of a downsampling block, the second half of a gated unit.
        data: unlabelled inputs: a dataset, a DataLoader, an iterable of batches, a tensor or a mapping of tensors (see
            `hf_lgelu.refit.batches.read_batches`). Labels, where there are some, only go into the metrics of the
            report. Of several processes each may have all of it, or a share.
        evaluation_data: a second set, in the same forms, on which the networks are compared; the same on every process.
        batch_size: inputs run at once. Default: 1,024 rows of features, 2,048 tokens, 32 images.
        collate: makes a batch of a list of the dataset's items.
        max_units: at most so many rows, sequences or images of `data`.
        kinds: rows of `SMOOTH_KINDS`: which gates become ReLU.
        allow_unrefitted: where a map behind a gate cannot be refitted (shared or tied weights, no linear map), exchange
            the gate all the same and say so in the report.
        rewrite_config: rewrite the config keys that the family uses, so that transformers loads the saved model.
        progress: show a progress bar.

    Raises:
        ValueError: nothing to convert, inputs that do not go together or are fewer than 16 distinct rows, or a model
            that torch.export cannot trace.
        TypeError: a model that is no module, or data of another kind.
        ConversionRefusedError: a map behind a gate cannot be refitted, numbers are not finite, or the refit is no
            nearer to the original than the direct swap.
        RuntimeError: wrapped, scripted or quantized model, or a config without a key that says ReLU at these sites.

    >>> import torch
    >>> from hf_lgelu import convert_to_relu
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    >>> converted, report = convert_to_relu(net, torch.randn(200, 4))
    >>> [type(module).__name__ for module in converted]
    ['Linear', 'ReLU', 'Linear']
    >>> report.held_out.refitted.kl < report.held_out.direct.kl
    True
    """
    started = time.perf_counter()
    model = operable_module(model)
    _refuse_quantized(model)
    sites = find_sites(model, check_kinds(kinds))
    with evaluation_mode(model):
        converted = copy.deepcopy(model)
    surgery = substitute_relu(converted, kinds=kinds, rewrite_config=rewrite_config)
    state = known_processes()
    folds = deal_folds(
        for_decoder(model, read_batches(data, batch_size=batch_size, collate=collate, max_units=max_units)),
        batch_size=batch_size,
        state=state,
    )
    _require_comparable(model, folds.first.load())  # what does not fit is known before the work
    second = _second_set(model, evaluation_data, batch_size, collate, state)
    with evaluation_mode(model):
        layers = _refit(model, converted, sites, folds, allow_unrefitted, progress and state.is_main_process)
        substitution = TemporaryRelu(model, kinds=kinds)
        held_out, evaluation = (
            None if batches is None else evaluate_conversion(model, converted, substitution, batches)
            for batches in ((batch.load() for batch in folds.held_out), second)
        )
    report = ConversionReport(
        model=type(model).__name__,
        gates={site.name: type(site.module).__name__ for site in sites},
        layers=tuple(layers),
        held_out=held_out,
        evaluation=evaluation,
        units=folds.units.given,
        distinct_units=len(folds.units.keys),
        rows=folds.rows,
        folds=len(folds.folds),
        seconds=time.perf_counter() - started,
        config_changes=tuple(map(str, surgery.config_changes)),
        smooth_calls=tuple(map(str, find_smooth_calls(converted, folds.first.load()[:1].inputs))),
        warnings=(*_warnings(folds, layers, evaluation), *_elsewhere(model, surgery)),
    )
    _require_better(report)
    return Conversion(converted, report)


def _refuse_quantized(model: nn.Module) -> None:
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ConversionRefusedError(
            f"{type(model).__name__} is quantized: its weights cannot be refitted. Convert the model first, then "
            "quantize the ReLU model"
        )


def _require_comparable(model: nn.Module, batch: Batch) -> None:
    """Raise ValueError unless the model takes a batch of the data and gives an output that can be compared."""
    (first,) = taken_by(model, [batch], "data")
    main_output(model, first[:2].inputs)


def _second_set(
    model: nn.Module, data: Any, batch_size: int | None, collate: Callable[[Any], Any] | None, state: PartialState
) -> Iterator[Batch] | None:
    """This process's part of the second set. Raises ValueError where the model does not take it."""
    if data is None:
        return None
    batches = for_decoder(model, read_batches(data, batch_size=batch_size, collate=collate))
    batches = cut_batches(taken_by(model, batches, "evaluation_data"), batch_size)
    return itertools.islice(batches, state.process_index, None, state.num_processes)


def _refit(
    model: nn.Module,
    converted: nn.Module,
    sites: Sequence[ActivationSite],
    folds: Folds,
    allow_unrefitted: bool,
    progress: bool,
    extra: int = 0,
    placed: bool = True,
) -> list[LayerRefit]:
    """Refit `converted` in place, layer after layer; what was done to each."""
    with Carrier(model, converted, sites, folds) as carrier:
        found = carrier.layers
        _refuse_unfit(type(model).__name__, found, allow_unrefitted)
        preparation = Preparation(model, sites, folds, carrier.trace.program, found, extra) if placed else None
        if preparation is not None:
            preparation.write(converted, None)
        names = [site.name for site in sites]
        done = [
            LayerRefit(
                (unfit.name,), tuple(names[index] for index in unfit.sites), "kept", None, None, None, 0, 0,
                note=f"not refitted: {unfit.reason}",
            )
            for unfit in found.unfit
        ]  # fmt: skip
        steps = len(found.layers) * (sum(map(len, folds.folds)) + 1)
        with tqdm(total=steps, desc="refit", unit="batch", disable=not progress) as bar:
            for index, layer in enumerate(found.layers):
                bar.set_postfix_str(layer.maps[0].name)
                fit, total = fit_layer(layer, carrier.moments(index, bar.update))
                write_refit(converted, carrier.trace.program, layer, fit, total)
                if preparation is not None:
                    preparation.write(converted, index)
                done.append(_described(layer, fit, total, names))
                bar.update()
    return done


def fit_layer(layer: Layer, folds: Sequence[Moments]) -> tuple[RidgeFit, Moments]:
    """The fit, the same on every process, and the sums over all rows. Raises ConversionRefusedError where they are not
    finite."""
    try:
        fit = fit_ridge(folds, intercept=layer.has_intercept)
    except NotFiniteError as error:
        raise ConversionRefusedError(
            f"what reaches {layer.name} is not finite, in the original or behind the layers already refitted; look "
            "for NaN or infinities in the data and in the weights"
        ) from error
    return fit, functools.reduce(operator.add, folds)


def _refuse_unfit(model_class: str, found: Layers, allow_unrefitted: bool) -> None:
    if found.unfit and not allow_unrefitted:
        named = "".join(f"\n  {unfit.name}: {unfit.reason}" for unfit in found.unfit)
        raise ConversionRefusedError(
            f"what is behind the gates of {model_class} cannot all be refitted:{named}\nTo "
            "exchange these gates all the same, with the weights as they are, pass allow_unrefitted=True "
            "(--allow_unrefitted); or train the model with hardening"
        )
    if not found.layers:
        raise ConversionRefusedError(
            f"{model_class} has no linear map behind its gates that could be refitted; train it with hardening, or "
            "exchange the gates alone (substitute_relu) and measure what that changes"
        )


def _described(layer: Layer, fit: RidgeFit, total: Moments, names: Sequence[str]) -> LayerRefit:
    return LayerRefit(
        layers=tuple(consumer.name for consumer in layer.maps),
        sites=tuple(names[index] for index in layer.sites),
        choice=fit.choice,
        strength=fit.strength,
        error_before=fit.error_before,
        error_after=fit.error_after,
        width=layer.width,
        rows=total.count,
        note=None if layer.has_intercept else "no bias: only its weights were refitted",
    )


def _elsewhere(model: nn.Module, surgery: SurgeryReport) -> tuple[str, ...]:
    """What other programs make of a config that now says ReLU."""
    return runtime_warnings(getattr(model, "config", None)) if surgery.config_changes else ()


def _warnings(folds: Folds, layers: Iterable[LayerRefit], second: Evaluation | None) -> Iterator[str]:
    units = len(folds.units.keys)
    if not folds.held_out_units:
        few = "are too few"
        if folds.rows >= LEAST_ROWS_TO_HOLD_OUT:
            few = f"are of too few distinct inputs ({units})"
        yield (
            f"{folds.rows} rows {few} to hold some out: the strength is fixed and nothing was checked; give 64 or "
            "more, of several inputs, at best several times the width of the widest layer"
        )
    elif len(folds.folds) == 1:
        yield (
            f"{units} distinct inputs are too few for four folds beside what is held out: the strength is fixed; give "
            "more"
        )
    few = [layer for layer in layers if 4 * layer.rows < layer.width]
    if few:
        yield (
            f"{len(few)} layers were fitted on fewer rows than a quarter of their width (first "
            f"{few[0].layers[0]}: {few[0].rows} rows, {few[0].width} features)"
        )
    for layer in layers:
        if layer.note and layer.note.startswith("not refitted"):
            yield f"{layer.layers[0]}: {layer.note}"
    if second is not None and not math.isfinite(_distance(second.refitted)):
        yield "on the second set the outputs are not finite: look for NaN or infinities in its inputs"
    elif second is not None and not _distance(second.refitted) < _distance(second.direct):
        yield (
            "on the second set the refit is no nearer to the original than the direct swap: the data that was fitted "
            "on is probably not from where that set is"
        )


def _require_better(report: ConversionReport) -> None:
    """Raise where the refit is no nearer to the original than the direct swap, on what was held out."""
    if report.held_out is None:
        return
    direct, refitted = (_distance(change) for change in (report.held_out.direct, report.held_out.refitted))
    if not refitted < direct and not refitted == direct == 0:
        measure = "relative error" if report.held_out.refitted.kl is None else "KL"
        raise ConversionRefusedError(
            f"on {report.held_out.rows:,} rows that were held out, the refitted network is no nearer to the original "
            f"({measure} {refitted:.3g}) than the direct swap ({direct:.3g}); give more inputs, from where the model "
            "is used. The model is as it was",
            report,
        )


def _distance(change: NetChange) -> float:
    return change.relative_error if change.kl is None else change.kl
