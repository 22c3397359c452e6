"""A network refitted in place, layer after layer, and what may be done to it beside the refits."""

import functools
import math
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from torch import nn
from tqdm.auto import tqdm

from hf_lgelu.models.sites import ActivationSite
from hf_lgelu.refit.blocks import BlockRows, block_moments, reconstruct_block
from hf_lgelu.refit.carry import Carrier
from hf_lgelu.refit.ladder import OutOfTimeError
from hf_lgelu.refit.layers import Layer, Layers
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.processes import main_decides
from hf_lgelu.refit.report import ENOUGH_ROWS, NOT_COUNTED, LayerRefit
from hf_lgelu.refit.resume import RungWork
from hf_lgelu.refit.ridge import NotFiniteError, RidgeFit, fit_ridge
from hf_lgelu.refit.verdict import WHERE_NOT_FINITE, ConversionRefusedError
from hf_lgelu.refit.weights import write_refit


class LayerStep(Protocol):
    """What is done to the converted network beside the refits."""

    def begin(self, converted: nn.Module) -> None:
        """Before the first layer."""

    def behind_layer(self, converted: nn.Module, index: int) -> str | None:
        """After the refit of a layer; a note for the report."""


def refit_layers(
    carrier: Carrier,
    converted: nn.Module,
    allow_unrefitted: bool,
    bar: tqdm,
    steps: Sequence[LayerStep],
    work: RungWork,
    ends: float,
) -> list[LayerRefit]:
    """Refit `converted` in place, layer after layer, and let `steps` do their part; what was done to each.

    A step keeps nothing from layer to layer but in the network: layers that are done are taken from `work`.
    Raises OutOfTimeError where layers are left when time.perf_counter() is at `ends`.
    """
    with carrier:
        found, names = carrier.layers, carrier.site_names
        _refuse_unfit(type(converted).__name__, found, allow_unrefitted)
        for step in steps:
            step.begin(converted)
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
                fit, total = fit_layer(layer, carrier.moments(index, bar.update))
                write_refit(converted, carrier.trace.program, layer, fit, total)
                notes = [carrier.note(index), *(step.behind_layer(converted, index) for step in steps)]
                done.append(_described(layer, fit, total, names, filter(None, notes)))
                work.save(index, converted, done[-1])
                bar.update()
    return done


def fit_layer(layer: Layer, folds: Sequence[Moments]) -> tuple[RidgeFit, Moments]:
    """The fit, the same on every process, and the sums over all rows. Raises ConversionRefusedError where they are not
    finite."""
    try:
        fit = fit_ridge(folds, intercept=layer.has_intercept)
    except NotFiniteError as error:
        raise ConversionRefusedError(
            f"what reaches {layer.name} is not finite, in the original or behind the layers already refitted; "
            f"{WHERE_NOT_FINITE}"
        ) from error
    return fit, functools.reduce(operator.add, folds)


class Reconstruction:
    """The step of effort "blocks": both maps of a block by Adam, then once more the ridge."""

    def __init__(self, carrier: Carrier, sites: Sequence[ActivationSite]) -> None:
        self._carrier, self._sites = carrier, sites

    def begin(self, converted: nn.Module) -> None:
        """Nothing."""

    def behind_layer(self, converted: nn.Module, index: int) -> str | None:
        """The block of a layer, where it is one; the rows of the first fold decide whether it is kept."""
        block = self._carrier.trace.blocks.get(index)
        if block is None:
            return None
        none = BlockRows.none(converted, block)  # a process may have no batch of a fold
        unseen, *others = [BlockRows.of([none, *parts]) for parts in self._carrier.block_rows]
        gate = converted.get_submodule(self._sites[block.unit.site].name)
        done = reconstruct_block(converted, block, gate, BlockRows.of(others), unseen)
        if not done.is_kept:
            return "both maps moved: no nearer, taken back"
        layer = self._carrier.layers.layers[index]
        fit, total = fit_layer(layer, block_moments(converted, block, gate, [unseen, *others]))
        write_refit(converted, self._carrier.trace.program, layer, fit, total)
        return f"both maps moved: error times {done.after / done.before:.2f}"


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


def _described(layer: Layer, fit: RidgeFit, total: Moments, names: Sequence[str], notes: Iterable[str]) -> LayerRefit:
    return LayerRefit(
        layers=tuple(consumer.name for consumer in layer.maps),
        sites=tuple(names[index] for index in layer.sites),
        choice=fit.choice,
        strength=fit.strength,
        error_before=fit.error_before,
        error_after=fit.error_after,
        width=layer.width,
        rows=total.count,
        note=", ".join((*_notes(layer, total.count), *notes)) or None,
    )


def _notes(layer: Layer, rows: int) -> Iterator[str]:
    if not layer.has_intercept:
        yield "no bias: only its weights were refitted"
    if rows < ENOUGH_ROWS * layer.width:
        yield f"starved: {rows:,} rows for {layer.width:,} features"
