"""The rung "refit", which goes through a network layer by layer; the rung "place" builds on it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

import torch
from torch import nn

from hf_lgelu.formats import counted, significant
from hf_lgelu.graph.layers import Layer, Layers, last_biases
from hf_lgelu.models.copies import forget_quantizer, independent_copy
from hf_lgelu.refit.carry import KINKS, Carrier
from hf_lgelu.refit.folds import load_own
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.output_loss import fit_last_biases
from hf_lgelu.refit.refusals import WHERE_NOT_FINITE, ConversionRefusedError
from hf_lgelu.refit.report import ENOUGH_ROWS, LayerRefit
from hf_lgelu.refit.ridge import STRENGTHS, WEAKER, RidgeFit, fit_ridge, nearest_features
from hf_lgelu.refit.task import Student, Task
from hf_lgelu.refit.weights import add_constant, write_refit
from hf_lgelu.refit.widen import WiderOriginal

Writes = Mapping[int | None, Sequence[Callable[[nn.Module], None]]]
"""{index of a layer: functions that write into the student after the layer's refit}; with None before the first."""


class Refit:
    """The rung that fits the maps after the gates, layer by layer.

    A layer's features are the inputs of its maps in the student. Its aim is the last value that the maps reach through
    sums and scales alone, such as the residual sum. The fit changes the weights so that the student has there what the
    original has. A row of the fit holds the features, and the original's values at the aim minus the student's.

    Its life, in `make`:

    1. The student is a copy of the original (of a wider one, with `width`) whose gates are ReLU.
    2. A rung above `plan`s what it writes in addition. What waits for no layer is written.
    3. A `Carrier` brings both networks to each layer in turn, the student with the layers already refitted. The gate
       before a depthwise map gets its kinks. The ridge regression is fitted and written into the student, then what
       waited for this layer.
    4. The biases of a detector's last maps are fitted on its loss.
    5. The student is compared with the original on the samples that choose.
    """

    effort = "refit"

    def __init__(self, task: Task) -> None:
        self.task = task

    @property
    def original(self) -> WiderOriginal:
        """The original with the student's extra units and biases; here without any."""
        return WiderOriginal(self.task.model)

    def plan(self, carrier: Carrier) -> Writes:
        """What the rung writes into the student in addition to the refits; here nothing."""
        return {}

    def make(self, best: Student | None) -> Student:
        """A new student, made from the original; `best` is the nearest one so far."""
        task, original = self.task, self.original
        student = independent_copy(original.model)
        changes = [*original.config_changes, *task.exchange.carry_out(student)]
        told = [*map(str, changes), *forget_quantizer(student)]

        is_wider = original.model is not task.model
        recordings = task.exchange.recordings(task.read.of(original.model)) if is_wider else task.recordings
        with closing(Carrier(recordings, student, task.folds)) as carrier:  # runs both networks side by side
            layers = carrier.layers
            names = [site.name for site in recordings.sites]
            writes = self.plan(carrier)
            for write in writes.get(None, ()):
                write(student)
            refits = [*_without_refit(layers, names)]
            begun = time.perf_counter()
            task.tell(f"{self.effort}: {counted(len(layers.layers), 'layer')}")
            for index, layer in enumerate(layers.layers):
                # Both networks run up to the layer. The sums over its rows are gone before the next layer's.
                folds = _at_nearest_kinks(student, layer, carrier.advance_to(index))
                # Ridge, written into the student. The next `advance_to` runs the layer's maps again, and carries on.
                fit = _solved(layer, folds)
                if fit is not None:
                    write_refit(student, carrier.recording_of[index], layer, fit)
                    for write in writes.get(index, ()):
                        write(student)
                # In a wider network, a block that could not be widened.
                is_left = any(original.extra.values()) and not any(map(original.extra.get, layer.sites))
                note = "as many units as before" if is_left else None
                row, done = _described(layer, fit, names, carrier.note(index), note), index + 1
                refits.append(row)
                del fit
                change = f"error {significant(row.error_before)} → {significant(row.error_after)}"
                seconds = (time.perf_counter() - begun) / done * (len(layers.layers) - done)
                task.tell(f"{done}/{len(layers.layers)} {row.layers[0]}  {change}  {seconds:.0f} s left")

        if task.few.is_sigmoid_detector and (biases := last_biases(carrier.pair.recording, carrier.pair.layers.layers)):
            fit_last_biases(task.read, task.read.of(student), task.folds, biases)
        # On samples that nothing was fitted on; they choose between the rungs.
        held_out, gaps = task.evaluate(student, load_own(task.folds.choosing))
        return Student(student, tuple(refits), held_out, gaps, tuple(told), original.share)


def _without_refit(layers: Layers, names: Sequence[str]) -> Iterator[LayerRefit]:
    """The entries of gates that are exchanged without a refit of the maps after them."""
    for (name, reason), before in layers.unfit.items():
        gates = tuple(names[index] for index in sorted(before))
        yield LayerRefit((name,), gates, "unchanged", note=f"not refitted: {reason}", is_unfit=True)
    for gate in (names[index] for index in layers.unread):
        note = "no output that counts depends on it"
        yield LayerRefit((gate,), (gate,), "unchanged", note=note, is_unread=True)


def _at_nearest_kinks(student: nn.Module, layer: Layer, sums: Sequence[list[Moments]]) -> list[Moments]:
    """The folds' sums over a layer's rows, with ReLUs that bend at 0 or, before a depthwise map, at the nearest kinks.

    `sums` are those with each kink, 0 first. A kink is written into the student as a constant before the gate. Raises
    ConversionRefusedError where a sum is not finite.
    """
    folds = sums[0]
    if not all(fold.is_finite() for fold in folds):
        raise ConversionRefusedError(
            f"what reaches {layer.name} is not finite, in the original or after the layers already refitted; "
            f"{WHERE_NOT_FINITE}"
        )
    if (gate := layer.depthwise_gate) is None or len(folds) < 2:
        return folds
    folds, nearest = nearest_features(sums, intercept=layer.has_intercept)
    kinks = torch.tensor(KINKS, dtype=torch.float64)[nearest.cpu()]
    add_constant(student, gate.before, slice(None), -kinks / gate.factor.to(kinks), None)
    return folds


def _solved(layer: Layer, folds: list[Moments]) -> RidgeFit | None:
    """The ridge of a layer; None where no batch leads to it."""
    if not folds:
        return None
    # Other modules hold a tied weight. Of maps without a gate, a single fold cannot show that a change helps.
    may_change_weights = not layer.is_tied and (bool(layer.sites) or len(folds) > 1)
    strengths = STRENGTHS if layer.sites else (*WEAKER, *STRENGTHS)
    return fit_ridge(folds, intercept=layer.has_intercept, strengths=strengths if may_change_weights else ())


def _described(layer: Layer, fit: RidgeFit | None, names: Sequence[str], *more: str | None) -> LayerRefit:
    sites = tuple(names[index] for index in layer.sites)
    if fit is None:
        return LayerRefit((layer.name,), sites, "unchanged", note="not refitted: no batch leads to it", is_unfit=True)
    rows = fit.moments.count
    notes = [] if layer.has_intercept else ["no bias: only its weights were refitted"]
    if rows < ENOUGH_ROWS * layer.width:
        notes.append(f"starved: {rows:,} rows for {layer.width:,} features")
    return LayerRefit(
        layers=tuple(consumer.name for consumer in layer.maps),
        sites=sites,
        choice=fit.choice,
        strength=fit.strength,
        error_before=fit.error_before,
        error_after=fit.error_after,
        width=layer.width,
        rows=rows,
        note=", ".join([*notes, *filter(None, more)]) or None,
    )
