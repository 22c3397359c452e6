"""The rungs that go through a network layer after layer: the refit alone, and with placed kinks and added units.

For each layer, in forward order: sums over what reaches it in the network under way and what the original computes
there (moments), the ridge regression between the two, its solution written into the network, and both networks carried
on to the next layer.
"""

import functools
import math
import operator
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from torch import nn

from hf_lgelu.formats import counted, significant
from hf_lgelu.models.batches import Batch
from hf_lgelu.models.config_keys import ConfigChange
from hf_lgelu.models.example_run import evaluation_mode
from hf_lgelu.models.operable import independent_copy
from hf_lgelu.models.outputs import task_outputs
from hf_lgelu.refit.carry import Carrier
from hf_lgelu.refit.compare import evaluate_conversion
from hf_lgelu.refit.config import ConversionConfig
from hf_lgelu.refit.folds import Folds
from hf_lgelu.refit.layers import Layer, Layers
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.plan import Plan
from hf_lgelu.refit.processes import main_decides
from hf_lgelu.refit.program import Program, Programs
from hf_lgelu.refit.report import ENOUGH_ROWS, Evaluation, LayerRefit
from hf_lgelu.refit.resume import Work
from hf_lgelu.refit.ridge import WEAKER, NotFiniteError, RidgeFit, fit_ridge
from hf_lgelu.refit.verdict import WHERE_NOT_FINITE, ConversionRefusedError
from hf_lgelu.refit.weights import forget_quantizer, write_refit


class OutOfTimeError(Exception):
    """A rung was ended: another one has been reached, and there is no time left for more."""


@dataclass(frozen=True)
class Task:
    """What every rung works with: the original `model`, the samples, what is asked for, and what is done already."""

    model: nn.Module
    folds: Folds
    plan: Plan
    config: ConversionConfig
    work: Work
    progress: bool = False
    _compared: list[float] = field(default_factory=list)  # seconds

    def tell(self, line: str) -> None:
        """Print a line on stderr, where progress is to be shown."""
        if self.progress:
            print(line, file=sys.stderr, flush=True)

    @functools.cached_property
    def programs(self) -> Programs:
        """The original's traces, one for each shape of inputs."""
        return self.programs_of(self.model)

    def programs_of(self, model: nn.Module) -> Programs:
        """Traces of the original or of a wider copy, up to the outputs that count."""
        outputs_of = lambda output: list(task_outputs(output, self.config.outputs).values())  # noqa: E731
        return Programs(model, self.plan.sites(model), outputs_of)

    def compare(self, student: nn.Module) -> tuple[Evaluation | None, tuple[float, ...]]:
        """Original, plain swap and student on the samples that choose, and the student's distance on each of them."""
        begun = time.perf_counter()
        found = self.evaluate(student, (batch.load() for batch in self.folds.choosing))
        self._compared.append(time.perf_counter() - begun)
        return found

    def evaluate(self, student: nn.Module, batches: Iterable[Batch]) -> tuple[Evaluation | None, tuple[float, ...]]:
        """The same on other batches."""
        return evaluate_conversion(self.model, student, self.plan.plain_swap(self.model), batches, self.config.outputs)

    def seconds_until(self, deadline: float) -> float:
        """The time that a rung may take: its last look, and two comparisons behind it, have to end by `deadline`."""
        if deadline == math.inf:
            return math.inf
        return main_decides(deadline - time.perf_counter() - 3 * max(self._compared, default=0.0))


@dataclass(frozen=True)
class Student:
    """The converted network of one rung, and what was done to it; `gaps` is its distance on each sample held out."""

    effort: str
    model: nn.Module
    layers: tuple[LayerRefit, ...]
    held_out: Evaluation | None
    gaps: tuple[float, ...]
    config_changes: tuple[str, ...]
    width_share: float


@dataclass(frozen=True)
class WiderOriginal:
    """A network that computes what the original does, with `extra` idle units in the block of each site.

    `share` is the width as a share of the original's; `config_changes` what its config says otherwise.
    """

    model: nn.Module
    extra: Mapping[int, int] = field(default_factory=dict)
    share: float = 1.0
    config_changes: tuple[ConfigChange, ...] = ()


class Refit:
    """The maps behind the gates, fitted layer after layer."""

    effort = "refit"

    def __init__(self, task: Task) -> None:
        self.task = task

    @property
    def original(self) -> WiderOriginal:
        """The original with the units and biases that the student is to have besides."""
        return WiderOriginal(self.task.model)

    def make(self, best: Student | None, deadline: float) -> Student:
        """A new student, made from the original; `best` is the nearest one so far.

        Raises OutOfTimeError where a layer that takes as long as the longest before would not end by `deadline`.
        """
        # The student: the original, or its wider copy, with the new gates.
        task, original = self.task, self.original
        programs = task.programs if original.model is task.model else task.programs_of(original.model)
        with evaluation_mode(original.model):
            student = independent_copy(original.model)
        rewritten = task.plan.carry_out(student)
        changes = [*map(str, (*original.config_changes, *rewritten)), *forget_quantizer(student)]

        # Both networks, traced; the layers in forward order.
        carrier = Carrier(programs, student, task.folds)
        program, found, names = carrier.trace.program, carrier.layers, [site.name for site in programs.sites]
        if found.misread:
            raise ConversionRefusedError(
                f"{', '.join(found.misread)} of {type(student).__name__} works in place, and its input is used again: "
                "what is behind it cannot be refitted. Make it one with inplace=False, where the code means its input"
            )
        self.prepare(programs, program, found)
        work = task.work(self.effort)
        done = [*_without_refit(found, names)]
        task.tell(f"{self.effort}: {counted(len(found.layers), 'layer')}")
        with closing(carrier):
            self.write_behind(student, None)
            work.begin(student)
            begun = last = time.perf_counter()
            longest = 0.0
            for index, layer in enumerate(found.layers):
                if task.seconds_until(deadline) < longest:
                    raise OutOfTimeError
                if index < work.done:  # an earlier call has fitted the layer
                    done += filter(None, [work.restore(index, student)])
                    continue
                if index == work.done:  # carry on behind the layers of that call
                    for restored in range(index):
                        carrier.pass_by(restored)
                # Carry both networks on to the layer; sums over what reaches it, the ridge, its solution written.
                moments = carrier.moments(index)
                try:
                    fit = fit_ridge(moments, intercept=layer.has_intercept, weaker=() if layer.sites else WEAKER)
                except NotFiniteError as error:
                    raise ConversionRefusedError(
                        f"what reaches {layer.name} is not finite, in the original or behind the layers already "
                        f"refitted; {WHERE_NOT_FINITE}"
                    ) from error
                total = functools.reduce(operator.add, moments)
                write_refit(student, program, layer, fit, total)
                self.write_behind(student, index)
                done.append(_described(layer, fit, total, names, carrier.note(index), self.note(layer)))
                work.save(index, student, done[-1])
                before, last = last, time.perf_counter()
                longest = max(longest, last - before)
                left = (last - begun) / (index + 1 - work.done) * (len(found.layers) - index - 1)
                task.tell(
                    f"{index + 1}/{len(found.layers)} {layer.maps[0].name}  error {significant(fit.error_before)} → "
                    f"{significant(fit.error_after)}  {last - before:.1f} s  {left:.0f} s left"
                )

        return Student(self.effort, student, tuple(done), *task.compare(student), tuple(changes), original.share)

    def prepare(self, programs: Programs, program: Program, found: Layers) -> None:
        """Find what the rung writes into the student beside the refits: here nothing."""

    def note(self, layer: Layer) -> str | None:
        """What the report is to say of a layer beside its fit; None for nothing."""

    def write_behind(self, student: nn.Module, index: int | None) -> None:
        """Write what waited for the refit of a layer; what waits for none comes first, with None."""


def _without_refit(found: Layers, names: Sequence[str]) -> Iterator[LayerRefit]:
    """Gates that are exchanged with no refit behind them."""
    for unfit in found.unfit:
        gates = tuple(names[index] for index in unfit.sites)
        note = f"not refitted: {unfit.reason}"
        yield LayerRefit((unfit.name,), gates, "kept", None, None, None, 0, 0, note, is_unfit=True)
    note = "no output that counts depends on it"
    for gate in (names[index] for index in found.beside):
        yield LayerRefit((gate,), (gate,), "kept", None, None, None, 0, 0, note, is_uncounted=True)


def _described(layer: Layer, fit: RidgeFit, total: Moments, names: Sequence[str], *more: str | None) -> LayerRefit:
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
        note=", ".join([*notes, *filter(None, more)]) or None,
    )
