"""A network refitted in place, layer after layer."""

import functools
import math
import operator
import time
from collections.abc import Sequence

from torch import nn
from tqdm.auto import tqdm

from hf_lgelu.refit.carry import Carrier
from hf_lgelu.refit.ladder import OutOfTimeError
from hf_lgelu.refit.layers import Layer, Layers
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.preparation import Preparation
from hf_lgelu.refit.processes import main_decides
from hf_lgelu.refit.report import ENOUGH_ROWS, NOT_COUNTED, LayerRefit
from hf_lgelu.refit.resume import RungWork
from hf_lgelu.refit.ridge import NotFiniteError, RidgeFit, fit_ridge
from hf_lgelu.refit.verdict import WHERE_NOT_FINITE, ConversionRefusedError
from hf_lgelu.refit.weights import write_refit


def refit_layers(
    carrier: Carrier,
    converted: nn.Module,
    allow_unrefitted: bool,
    bar: tqdm,
    preparation: Preparation | None,
    work: RungWork,
    ends: float,
) -> list[LayerRefit]:
    """Refit `converted` in place, layer after layer, and write the `preparation` beside; what was done to each.

    Layers that are done are taken from `work`.
    Raises OutOfTimeError where layers are left when time.perf_counter() is at `ends`.
    """
    with carrier:
        found, names = carrier.layers, carrier.site_names
        _refuse_unfit(type(converted).__name__, found, allow_unrefitted)
        if preparation is not None:
            preparation.begin(converted)
        work.begin(converted)
        done = [_kept(unfit.name, unfit.sites, f"not refitted: {unfit.reason}", names, True) for unfit in found.unfit]
        done += [_kept(names[index], (index,), NOT_COUNTED, names) for index in found.beside]
        with bar:
            for index, layer in enumerate(found.layers):
                if ends < math.inf and main_decides(time.perf_counter() > ends):
                    raise OutOfTimeError
                if index < work.done:
                    done += filter(None, [work.restore(index, converted)])
                    bar.update(carrier.steps_per_layer)
                    continue
                if index == work.done:
                    for before in range(index):
                        carrier.pass_by(before)
                bar.set_postfix_str(layer.maps[0].name)
                moments = carrier.moments(index, bar.update)
                try:
                    fit = fit_ridge(moments, intercept=layer.has_intercept)
                except NotFiniteError as error:
                    raise ConversionRefusedError(
                        f"what reaches {layer.name} is not finite, in the original or behind the layers already "
                        f"refitted; {WHERE_NOT_FINITE}"
                    ) from error
                total = functools.reduce(operator.add, moments)
                write_refit(converted, carrier.trace.program, layer, fit, total)
                if preparation is not None:
                    preparation.behind_layer(converted, index)
                done.append(_described(layer, fit, total, names, carrier.note(index)))
                work.save(index, converted, done[-1])
                bar.update()
    return done


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


def _kept(name: str, sites: Sequence[int], note: str, names: Sequence[str], is_unfit: bool = False) -> LayerRefit:
    gates = tuple(names[index] for index in sites)
    return LayerRefit((name,), gates, "kept", None, None, None, 0, 0, note, is_unfit=is_unfit)


def _described(layer: Layer, fit: RidgeFit, total: Moments, names: Sequence[str], note: str | None) -> LayerRefit:
    notes = [] if layer.has_intercept else ["no bias: only its weights were refitted"]
    if total.count < ENOUGH_ROWS * layer.width:
        notes.append(f"starved: {total.count:,} rows for {layer.width:,} features")
    return LayerRefit(
        layers=tuple(consumer.name for consumer in layer.maps),
        sites=tuple(names[index] for index in layer.sites),
        choice=fit.choice,
        strength=fit.strength,
        error_before=fit.error_before,
        error_after=fit.error_after,
        width=layer.width,
        rows=total.count,
        note=", ".join([*notes, *([] if note is None else [note])]) or None,
    )
