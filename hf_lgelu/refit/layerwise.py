"""The rungs that go through a network layer after layer: the refit alone, and with placed kinks and added units.

For each layer, in forward order: sums over what reaches it in the network under way and what the original computes
there (moments), the ridge regression between the two, its solution written into the network, and both networks carried
on to the next layer. Before it stands what every rung works with: the plan, the finished work, the task.
"""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from torch import nn
from transformers.activations import ACT2FN

from hf_lgelu.formats import counted, significant
from hf_lgelu.models.config_keys import ConfigChange
from hf_lgelu.models.copies import independent_copy
from hf_lgelu.models.record import plan_gates
from hf_lgelu.models.surgery import TemporaryRelu, exchange_activations, relu_for, reused_inputs
from hf_lgelu.networks.batches import TRIED, Batch
from hf_lgelu.networks.outputs import task_outputs
from hf_lgelu.networks.sites import SMOOTH_KINDS, ActivationSite, check_kinds, computes_same, find_sites
from hf_lgelu.processes import main_decides, own_part
from hf_lgelu.refit.carry import Carrier
from hf_lgelu.refit.compare import evaluate_conversion
from hf_lgelu.refit.config import SAMPLES_TO_RANK, ConversionConfig, TargetGate
from hf_lgelu.refit.folds import Folds, evenly
from hf_lgelu.refit.gate_costs import swap_costs
from hf_lgelu.refit.layers import Layer, Layers, find_layers
from hf_lgelu.refit.program import Program, Programs
from hf_lgelu.refit.report import ENOUGH_ROWS, Evaluation, LayerRefit
from hf_lgelu.refit.ridge import WEAKER, NotFiniteError, RidgeFit, fit_ridge
from hf_lgelu.refit.verdict import WHERE_NOT_FINITE, ConversionRefusedError
from hf_lgelu.refit.weights import forget_quantizer, oriented, write_refit

progress_log = logging.getLogger("hf_lgelu.progress")
"""What a conversion does, a line a layer, at level INFO, where stderr is no terminal."""


@dataclass(frozen=True)
class Plan:
    """Which gates of a model become the target: those of the kinds, but for the names in `keep`."""

    kinds: tuple[str, ...]
    keep: tuple[str, ...]
    target: TargetGate

    def sites(self, model: nn.Module) -> list[ActivationSite]:
        """The gates of a model that are exchanged."""
        return [site for site in find_sites(model, self.kinds) if site.name not in self.keep]

    def programs(self, model: nn.Module, config: ConversionConfig) -> Programs:
        """Traces of the original or of a wider copy, up to the outputs that count."""
        outputs_of = lambda output: list(task_outputs(output, config.outputs).values())  # noqa: E731
        return Programs(model, self.sites(model), outputs_of)

    def plain_swap(self, model: nn.Module) -> TemporaryRelu:
        """A context in which the gates of `model` are the target; no weight changes."""
        make = partial(make_gate, self.target)
        return TemporaryRelu(model, kinds=self.kinds, make=make, include=lambda name: name not in self.keep)

    def carry_out(self, model: nn.Module) -> tuple[ConfigChange, ...]:
        """The config keys rewritten, or the record put there. Changes `model` in place: its gates become the target."""
        sites = self.sites(model)
        gates = [relu_for(site) if self.target.name == "relu" else make_gate(self.target) for site in sites]
        return exchange_activations(model, sites, gates, plan_gates).config_changes


def plan_exchange(model: nn.Module, folds: Folds, config: ConversionConfig) -> Plan:
    """The plan that the options ask for; where `keep` is a number, with the names of the dearest gates.

    A gate that computes the target already stays, too, and a Softplus with no linear map behind it: it makes a scale
    positive, and ReLU would give zeros. Raises ValueError where all stay, and ConversionRefusedError where a gate
    changes what is used again: no operation of a trace works in place.
    """
    kinds, keep = check_kinds(config.kinds or SMOOTH_KINDS), config.keep
    sites, make = find_sites(model, kinds), partial(make_gate, config.gate)
    if isinstance(keep, int) and keep:
        some = own_part(evenly(folds.spread, math.ceil(SAMPLES_TO_RANK / len(folds.first))))
        dearest = list(swap_costs(model, [batch.load() for batch in some], kinds, config.outputs, make=make))[:keep]
        keep = [site.name for site in sites if site.name in dearest]
    done = [site.name for site in sites if site.kind != "prelu" and computes_same(site.module, make())]
    plan = Plan(kinds, tuple(dict.fromkeys([*(keep or ()), *done])), config.gate)
    sites = plan.sites(model)
    if any(site.kind == "softplus" for site in sites):
        program = plan.programs(model, config).of(folds.first)
        without_map = set().union(*find_layers(program, model, sites).unfit.values())
        scales = [site.name for index, site in enumerate(sites) if site.kind == "softplus" and index in without_map]
        plan = replace(plan, keep=(*plan.keep, *scales))
    if not plan.sites(model):
        raise ValueError(
            f"{', '.join(plan.keep[:4])}: nothing to convert, computes {config.gate.title} already, or is a Softplus "
            "with no linear map behind it"
        )
    if reused := reused_inputs(model, plan.sites(model), folds.first.load()[:TRIED].inputs):
        raise ConversionRefusedError(
            f"{', '.join(reused)} of {type(model).__name__} works in place, and its input is used again: what is "
            "behind it cannot be refitted. Make it one with inplace=False, where the code means its input"
        )
    return plan


def make_gate(target: TargetGate) -> nn.Module:
    """A new module of the target."""
    return ACT2FN[target.name] if target.slope is None else nn.LeakyReLU(target.slope)


class Work:
    """The finished layers of a rung, by which a killed conversion goes on (resume.py): here none, and none are kept."""

    def __init__(self, effort: str) -> None:
        self.effort, self.done = effort, 0

    def begin(self, converted: nn.Module) -> None:
        """Note the state of the network before the first layer."""

    def save(self, index: int, converted: nn.Module, layer: LayerRefit | None) -> None:
        """Keep what the layer has changed, and its row of the report."""

    def restore(self, index: int, converted: nn.Module) -> LayerRefit | None:
        """The row of one of the `done` layers, whose tensors are written into `converted` in place."""


class OutOfTimeError(Exception):
    """A rung was ended: another one has been reached, and there is no time left for more."""


@dataclass(frozen=True)
class Task:
    """What every rung works with: the original `model`, the samples, what is asked for, and what is done already."""

    model: nn.Module
    folds: Folds
    plan: Plan
    config: ConversionConfig
    work: Callable[[str], Work]
    progress: bool = False
    _compared: list[float] = field(default_factory=list)  # seconds

    def tell(self, line: str) -> None:
        """Print a line on stderr, where progress is to be shown, and log it elsewhere."""
        if self.progress:
            print(line, file=sys.stderr, flush=True)
        else:
            progress_log.info(line)

    @cached_property
    def programs(self) -> Programs:
        """The original's traces, one for each shape of inputs."""
        return self.plan.programs(self.model, self.config)

    def compare(self, student: nn.Module) -> tuple[Evaluation | None, tuple[float, ...]]:
        """Original, plain swap and student on the samples that choose, and the student's distance on each of them."""
        begun = time.perf_counter()
        found = self.evaluate(student, (batch.load() for batch in own_part(self.folds.choosing)))
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
    """A network that computes what the original does, with idle units."""

    model: nn.Module
    extra: Mapping[int, int] = field(default_factory=dict)  # {site: idle units in its block}
    share: float = 1.0  # the width as a share of the original's
    config_changes: tuple[ConfigChange, ...] = ()  # what its config says otherwise


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
        programs = task.programs if original.model is task.model else task.plan.programs(original.model, task.config)
        student = independent_copy(original.model)
        rewritten = task.plan.carry_out(student)
        changes = [*map(str, (*original.config_changes, *rewritten)), *forget_quantizer(student)]

        # Both networks, traced; the layers in forward order.
        carrier = Carrier(programs, student, task.folds)
        program, found, *_ = carrier.trace
        names = [site.name for site in programs.sites]
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
                if task.seconds_until(deadline - longest) < 0:
                    raise OutOfTimeError
                if index < work.done:  # an earlier call has fitted the layer
                    done += filter(None, [work.restore(index, student)])
                    continue
                # Carry both networks on to the layer; sums over what reaches it, the ridge, its solution written.
                folds = carrier.moments(index)
                try:
                    fit = fit_ridge(folds, intercept=layer.has_intercept, weaker=() if layer.sites else WEAKER)
                except NotFiniteError as error:
                    raise ConversionRefusedError(
                        f"what reaches {layer.name} is not finite, in the original or behind the layers already "
                        f"refitted; {WHERE_NOT_FINITE}"
                    ) from error
                write_refit(student, program, layer, fit)
                self.write_behind(student, index)
                halves = [unit.other for unit in found.units if unit.site in layer.sites and unit.other is not None]
                saving = [*(consumer.operation for consumer in layer.maps), *halves]
                saves = sum(oriented(student, operation).numel() for operation in saving)
                done.append(_described(layer, fit, names, saves, carrier.note(index), self.note(layer)))
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
    for (name, reason), before in found.unfit.items():
        gates = tuple(names[index] for index in sorted(before))
        yield LayerRefit((name,), gates, "kept", note=f"not refitted: {reason}", is_unfit=True)
    for gate in (names[index] for index in found.beside):
        note = "no output that counts depends on it"
        yield LayerRefit((gate,), (gate,), "kept", note=note, is_uncounted=True)


def _described(layer: Layer, fit: RidgeFit, names: Sequence[str], saves: int, *more: str | None) -> LayerRefit:
    rows = fit.moments.count
    notes = [] if layer.has_intercept else ["no bias: only its weights were refitted"]
    if rows < ENOUGH_ROWS * layer.width:
        notes.append(f"starved: {rows:,} rows for {layer.width:,} features")
    return LayerRefit(
        layers=tuple(consumer.name for consumer in layer.maps),
        sites=tuple(names[index] for index in layer.sites),
        choice=fit.choice,
        strength=fit.strength,
        error_before=fit.error_before,
        error_after=fit.error_after,
        width=layer.width,
        rows=rows,
        saves=saves if layer.sites else 0,
        note=", ".join([*notes, *filter(None, more)]) or None,
    )
