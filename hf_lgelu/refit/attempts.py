"""The networks that the rungs of the ladder make, layer by layer."""

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from tqdm.auto import tqdm

from hf_lgelu.models.config_keys import UnsupportedConfigError
from hf_lgelu.models.dataflow.trace import OutputsOf
from hf_lgelu.models.example_run import evaluation_mode
from hf_lgelu.models.loading import forget_checkpoint
from hf_lgelu.models.outputs import task_outputs
from hf_lgelu.models.own_forward import independent_copy
from hf_lgelu.refit.carry import Carrier
from hf_lgelu.refit.compare import conversion_sums, evaluation_of, unit_gaps
from hf_lgelu.refit.dials import EFFORTS, Dials, Effort
from hf_lgelu.refit.distill import can_be_distilled, distill
from hf_lgelu.refit.exchange import Exchange
from hf_lgelu.refit.folds import LEAST_ROWS_TO_HOLD_OUT, Folds
from hf_lgelu.refit.ladder import CHOSEN_ON_THEM, Climb, Metric, climb, is_nearer
from hf_lgelu.refit.layers import find_layers
from hf_lgelu.refit.layerwise import refit_layers
from hf_lgelu.refit.placement import find_gate_units
from hf_lgelu.refit.preparation import Preparation
from hf_lgelu.refit.program import Programs
from hf_lgelu.refit.report import Evaluation, LayerRefit
from hf_lgelu.refit.resume import Work
from hf_lgelu.refit.verdict import ConversionRefusedError
from hf_lgelu.refit.weights import forget_quantizer
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
    standard_errors: float = 0.0
    """By how many of them it has to be nearer on the units held out than another network to be kept."""


class Attempts:
    """Makes the networks of the ladder's rungs, each a new one; the given model stays as it is."""

    def __init__(
        self, model: nn.Module, folds: Folds, exchange: Exchange, dials: Dials, *, outputs: Sequence[str] | None,
        allow_unrefitted: bool, progress: bool, work: Work,
    ) -> None:  # fmt: skip
        """As for `convert_to_relu`; `work` is what is done by now of each rung."""
        self._model, self._folds, self._exchange, self._dials = model, folds, exchange, dials
        self._outputs, self._allow_unrefitted = outputs, allow_unrefitted
        self._progress, self._work = progress, work
        self._programs = Programs(model, exchange.sites(model), _chosen(outputs))
        self._ends = math.inf if dials.max_seconds is None else time.perf_counter() + dials.max_seconds

    @property
    def _can_hold_out(self) -> bool:
        return bool(self._folds.held_out_samples) and len(self._folds.folds) > 1

    @property
    def rungs(self) -> list[Effort]:
        """All that the model can take and there are inputs for."""
        if not self._can_hold_out:
            return ["refit"]
        possible = {"place": self._dials.can_be_placed, "distill": can_be_distilled(self._model)}
        return [effort for effort in EFFORTS if possible.get(effort, True)]

    def climb(self, metric: Metric | None) -> Climb[Attempt]:
        """Try the rungs that were asked for. Raises ValueError where there are no inputs for them."""
        efforts = self._dials.rungs
        if len(efforts) > 1 and not self._can_hold_out:
            raise ValueError(
                f"more than the refit (effort={efforts[-1]!r}) is only done where inputs can be held out for it: give "
                f"{LEAST_ROWS_TO_HOLD_OUT} rows or more, of several inputs"
            )
        if self._dials.width_budget > 1:
            _ = self._room  # what cannot be widened is known before the work
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
        is_placed = effort == "place"
        room = self._room if is_placed else Room(self._model)
        programs = self._programs
        if room.model is not self._model:
            programs = Programs(room.model, self._exchange.sites(room.model), _chosen(self._outputs))
        with evaluation_mode(room.model):
            converted = independent_copy(room.model)
        rewritten = self._exchange.carry_out(converted)
        changes = [*map(str, (*room.config_changes, *rewritten)), *forget_quantizer(converted)]
        forget_checkpoint(converted)
        carrier = Carrier(programs, converted, self._folds, gate_maps_change=is_placed)
        program, found = carrier.trace.program, carrier.layers
        preparation = None
        if is_placed:
            preparation = Preparation(room.model, programs.sites, self._folds, program, found, room.extra)
        layers = refit_layers(
            carrier,
            converted,
            self._allow_unrefitted,
            tqdm(total=len(found.layers) * carrier.steps_per_layer, desc=effort, disable=not self._progress),
            preparation,
            self._work.rung(effort),
            math.inf if best is None else self._ends,
        )
        moved = dict.fromkeys(name for unit in find_gate_units(program) for name in unit.parameters)
        moved |= dict.fromkeys(
            name for layer in found.layers for consumer in layer.maps for name in consumer.parameters
        )
        return Attempt(
            effort, converted, tuple(layers), *self._evaluated(converted), tuple(changes), room.share, tuple(moved)
        )

    @functools.cached_property
    def _room(self) -> Room:
        """For the placed gates; made before the work where it has to be wider."""
        with evaluation_mode(self._model):
            program = self._programs.of(self._folds.first)
            sites = self._programs.sites
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
        if work.done:
            work.restore(0, converted)
        else:
            work.begin(converted)
            distill(
                self._model,
                converted,
                self._folds,
                self._outputs,
                names=best.moved,
                max_seconds=None if self._ends == math.inf else max(1e-9, self._ends - time.perf_counter()),
                steps=steps,
                bf16=bf16,
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


def _chosen(names: Sequence[str] | None) -> OutputsOf:
    return lambda output: list(task_outputs(output, names).values())
