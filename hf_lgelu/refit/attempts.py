"""The networks that the rungs of the ladder make, layer by layer."""

import functools
import math
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import nn
from tqdm.auto import tqdm

from hf_lgelu.models.config_keys import UnsupportedConfigError
from hf_lgelu.models.dataflow.trace import OutputsOf
from hf_lgelu.models.example_run import evaluation_mode
from hf_lgelu.models.own_forward import independent_copy
from hf_lgelu.models.sites import ActivationSite
from hf_lgelu.models.task_outputs import task_outputs
from hf_lgelu.refit.blocks import BlockRows, block_moments, reconstruct_block
from hf_lgelu.refit.carry import Carrier
from hf_lgelu.refit.compare import conversion_sums, evaluation_of, unit_gaps
from hf_lgelu.refit.dials import EFFORTS, Dials, Effort
from hf_lgelu.refit.distill import distill
from hf_lgelu.refit.exchange import Exchange
from hf_lgelu.refit.folds import LEAST_ROWS_TO_HOLD_OUT, Folds
from hf_lgelu.refit.ladder import Climb, Metric, OutOfTimeError, climb
from hf_lgelu.refit.layers import Layer, Layers, find_layers
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.nearer import CHOSEN_ON_THEM, is_nearer
from hf_lgelu.refit.placement import find_gate_units
from hf_lgelu.refit.preparation import Preparation
from hf_lgelu.refit.processes import main_decides
from hf_lgelu.refit.program import Program
from hf_lgelu.refit.progress import Progress
from hf_lgelu.refit.report import ENOUGH_ROWS, Evaluation, LayerRefit
from hf_lgelu.refit.resume import RungWork, Work
from hf_lgelu.refit.ridge import NotFiniteError, RidgeFit, fit_ridge
from hf_lgelu.refit.thinning import Thinning
from hf_lgelu.refit.verdict import ConversionRefusedError
from hf_lgelu.refit.weights import forget_checkpoint, forget_quantizer, write_refit
from hf_lgelu.refit.widen import Room, make_room


@dataclass(frozen=True)
class Attempt:
    """A converted network, and what was done to it."""

    effort: Effort
    model: nn.Module
    layers: tuple[LayerRefit, ...]
    held_out: Evaluation | None
    gaps: tuple[float, ...]
    """How far the network is from the original on each unit held out."""
    config_changes: tuple[str, ...]
    width_share: float
    moved: tuple[str, ...]
    scaled: frozenset[str]
    """Names of the modules whose outputs have another scale than the original's: they are before a placed gate."""
    standard_errors: float = 0.0
    """By how many of them it has to be nearer on the units held out than another network to be kept."""


class Attempts:
    """Makes the networks of the ladder's rungs, each a new one; the given model stays as it is."""

    def __init__(
        self, model: nn.Module, folds: Folds, exchange: Exchange, dials: Dials, *, outputs: Sequence[str] | None,
        allow_unrefitted: bool, progress: Progress, work: Work,
    ) -> None:  # fmt: skip
        """As for `convert_to_relu`; `work` is what is done by now of each rung."""
        self._model, self._folds, self._exchange, self._dials = model, folds, exchange, dials
        self._outputs, self._allow_unrefitted = outputs, allow_unrefitted
        self._progress, self._work = progress, work
        self._ends = math.inf if dials.max_seconds is None else time.perf_counter() + dials.max_seconds

    @property
    def _can_hold_out(self) -> bool:
        return bool(self._folds.held_out_units) and len(self._folds.folds) > 1

    @property
    def rungs(self) -> list[Effort]:
        """All that there are inputs for."""
        if not self._can_hold_out or self._dials.zeros is not None:
            return ["refit"]
        return [effort for effort in EFFORTS if effort != "place" or self._dials.can_be_placed]

    def climb(self, metric: Metric | None) -> Climb[Attempt]:
        """Try the rungs that were asked for. Raises ValueError where there are no inputs for them."""
        efforts = self._dials.rungs
        if len(efforts) > 1 and not self._can_hold_out:
            raise ValueError(
                f"more than the refit (effort={efforts[-1]!r}) is only done where inputs can be held out for it: give "
                f"{LEAST_ROWS_TO_HOLD_OUT} rows or more, of several inputs"
            )
        self._progress.plan(efforts)
        return climb(
            efforts,
            self.make,
            lambda attempt: None if attempt.held_out is None else attempt.held_out.refitted.distance,
            nearer=lambda found, best: is_nearer(found.gaps, best.gaps, found.standard_errors),
            lost=lambda attempt: None if metric is None else metric.lost(attempt.model),
            tolerance=self._dials.tolerance,
            max_seconds=self._dials.max_seconds,
        )

    def make(self, effort: Effort, best: Attempt | None) -> Attempt:
        """The network of a rung: distilled from the best one so far, else made from the original."""
        if effort == "distill" and best is not None:
            return self._distilled(best)
        is_placed = effort != "refit" and self._dials.can_be_placed
        room = self._room if is_placed else Room(self._model)
        sites = self._exchange.sites(room.model)
        with evaluation_mode(room.model):
            converted = independent_copy(room.model)
        rewritten = self._exchange.carry_out(converted)
        changes = [*map(str, (*room.config_changes, *rewritten)), *forget_quantizer(converted)]
        forget_checkpoint(converted)
        carrier = Carrier(
            room.model,
            converted,
            sites,
            self._folds,
            _chosen(self._outputs),
            gate_maps_change=effort != "refit" or self._dials.zeros is not None,
            whole_blocks=effort == "blocks",
        )
        if effort == "blocks" and best is not None and not carrier.trace.blocks:
            return best  # of convolutions alone: there is no block of linear layers to move
        program, found = carrier.trace.program, carrier.layers
        steps: list[LayerStep] = []
        if is_placed:
            steps.append(Preparation(room.model, sites, self._folds, program, found, room.extra))
        if self._dials.zeros is not None:
            steps.append(Thinning(room.model, sites, self._folds, program, found, self._dials.zeros))
        if effort == "blocks":
            steps.append(Reconstruction(carrier, sites))
        layers = _refit(
            carrier,
            converted,
            self._allow_unrefitted,
            self._progress.bar(effort, len(found.layers) * carrier.steps_per_layer),
            steps,
            self._work.rung(effort),
            math.inf if best is None else self._ends,
        )
        units = find_gate_units(program)
        moved = dict.fromkeys(name for unit in units for name in unit.parameters)
        moved |= dict.fromkeys(
            name for layer in found.layers for consumer in layer.maps for name in consumer.parameters
        )
        return Attempt(
            effort, converted, tuple(layers), *self._evaluated(converted), tuple(changes), room.share, tuple(moved),
            frozenset(unit.before.weight_name.rpartition(".")[0] for unit in units
                      if is_placed or self._dials.zeros is not None),
        )  # fmt: skip

    @functools.cached_property
    def _room(self) -> Room:
        """For the placed gates of every rung."""
        with evaluation_mode(self._model):
            sites = self._exchange.sites(self._model)
            program = Program(self._model, sites, self._folds.first.load().inputs, _chosen(self._outputs))
            found = find_layers(program, self._model, sites)
            try:
                return make_room(self._model, program, found.layers, len(sites), self._dials.width_budget)
            except UnsupportedConfigError as error:
                keep = self._exchange.keep
                kept = "".join(f" {name} is kept, so its block stays as wide as it was." for name in keep)
                ways = "Keep no gate, or use width_budget=1" if keep else "Use width_budget=1"
                message = f"width_budget={self._dials.width_budget:g}: {error}.{kept} {ways}"
                raise ConversionRefusedError(message) from error

    def _distilled(self, best: Attempt) -> Attempt:
        converted = independent_copy(best.model)
        steps, bf16 = self._dials.distill_steps, self._dials.bf16
        # Which rung was best may differ from call to call, and the steps.
        work = self._work.rung(f"distill-{best.effort}-{steps or 'default'}{'-bf16' * bf16}")
        work.begin(converted)
        if work.done:
            work.restore(0, converted)
        else:
            distill(
                self._model,
                converted,
                self._folds,
                self._outputs,
                names=best.moved,
                max_seconds=None if self._ends == math.inf else max(1e-9, self._ends - time.perf_counter()),
                steps=steps,
                bf16=bf16,
                work=work,
            )
            if time.perf_counter() < self._ends:  # else the time ran out, and another call may have more
                work.save(0, converted, None)
        held_out, gaps = self._evaluated(converted)
        return replace(best, model=converted, held_out=held_out, gaps=gaps, standard_errors=CHOSEN_ON_THEM)

    def _evaluated(self, converted: nn.Module) -> tuple[Evaluation | None, tuple[float, ...]]:
        batches = (batch.load() for batch in self._folds.held_out)
        swap = self._exchange.direct_swap(self._model)
        sums = conversion_sums(self._model, converted, swap, batches, self._outputs)
        return (None, ()) if sums is None else (evaluation_of(sums), unit_gaps(sums))


class LayerStep(Protocol):
    """What is done to the converted network beside the refits."""

    def begin(self, converted: nn.Module) -> None:
        """Before the first layer."""

    def behind_layer(self, converted: nn.Module, index: int) -> str | None:
        """After the refit of a layer; a note for the report."""


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


def _refit(
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
        done += [_kept(names[index], (index,), "no output that counts depends on it", names) for index in found.beside]
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
                notes = [step.behind_layer(converted, index) for step in steps]
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


def _chosen(names: Sequence[str] | None) -> OutputsOf:
    return lambda output: list(task_outputs(output, names).values())
