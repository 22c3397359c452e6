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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from accelerate import PartialState
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_lgelu.models.config_keys import UnsupportedConfigError, pretrained_roots
from hf_lgelu.models.dataflow.trace import OutputsOf
from hf_lgelu.models.example_run import evaluation_mode
from hf_lgelu.models.runtimes import runtime_warnings
from hf_lgelu.models.sites import SMOOTH_KINDS, ActivationSite, check_kinds, find_sites
from hf_lgelu.models.smooth_calls import find_smooth_calls
from hf_lgelu.models.surgery import TemporaryRelu, operable_module
from hf_lgelu.models.task_outputs import task_outputs
from hf_lgelu.refit.batches import Batch, for_decoder, read_batches, taken_by
from hf_lgelu.refit.blocks import BlockRows, block_moments, reconstruct_block
from hf_lgelu.refit.carry import Carrier
from hf_lgelu.refit.compare import compared_outputs, evaluate_conversion
from hf_lgelu.refit.distill import distill
from hf_lgelu.refit.folds import LEAST_ROWS_TO_HOLD_OUT, Folds, cut_batches, deal_folds, known_processes
from hf_lgelu.refit.ladder import EFFORTS, Effort, check_effort, climb
from hf_lgelu.refit.layers import Layer, Layers, find_layers
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.placement import find_gate_units
from hf_lgelu.refit.program import Program
from hf_lgelu.refit.report import (
    HELD_OUT,
    SECOND_SET,
    ConversionReport,
    Evaluation,
    LayerRefit,
    NetChange,
    distance_in_words,
    evaluations,
    how_far,
    significant,
)
from hf_lgelu.refit.ridge import NotFiniteError, RidgeFit, fit_ridge
from hf_lgelu.refit.target_gates import TargetGate, check_target, substitute_gates
from hf_lgelu.refit.weights import forget_quantizer, why_not_writable, write_refit
from hf_lgelu.refit.widen import Preparation, Room, find_blocks, make_room, movable

ENOUGH_ROWS = 2
"""Rows a feature; a layer that was fitted on fewer is called starved."""


class Conversion(NamedTuple):
    """What `convert_to_relu` gives: the new model, and what was done.

    >>> import torch, hf_lgelu
    >>> from torch import Tensor, nn
    >>> net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    >>> conversion = hf_lgelu.convert_to_relu(net, torch.randn(200, 4))
    >>> type(conversion.model[1]).__name__, conversion.report.gates
    ('ReLU', {'1': 'GELU'})
    """

    model: nn.Module
    report: ConversionReport


class ConversionRefusedError(RuntimeError):
    """The model was not converted. `report` says what was measured, where anything was; the model is as it was.

    >>> import torch
    >>> from hf_lgelu import ConversionRefusedError, convert_to_relu
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    >>> try:
    ...     convert_to_relu(net, torch.randn(200, 4), max_kl=1e-12, strict=True)
    ... except ConversionRefusedError as error:
    ...     print(error.report.held_out.refitted.kl > 1e-12)
    True
    """

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
    outputs: Sequence[str] | None = None,
    max_kl: float | None = 0.1,
    strict: bool = False,
    keep: Sequence[str] = (),
    target: str = "relu",
    effort: str | None = None,
    width_budget: float = 1.0,
    tolerance: float | None = None,
    max_seconds: float | None = None,
    allow_unrefitted: bool = False,
    rewrite_config: bool = True,
    progress: bool = False,
) -> Conversion:
    """The same architecture with ReLU gates and refitted weights; `model` stays as it is.

    From 64 distinct rows on, a part is held out, and the refit must be nearer to the original there than the direct
    swap. That can still be far: the report says first how far, in the network's own measure where there are labels, and
    warns beyond `max_kl`. Rows must come from where the model will be used: that they do cannot be seen from the rows
    themselves, so give a second set as `evaluation_data`. In a process group (`accelerate launch`) the work is shared,
    every process must call, and each gets the same model.

    Args:
        model: trained, any module whose gates are modules: families of transformers, timm, your own, a
            SentenceTransformer (compared on its embeddings). Refitted are the first linear maps behind each gate:
            Linear, Conv1D, convolutions with any stride and groups, the joint ones of a downsampling block, the second
            half of a gated unit.
        data: unlabelled inputs: a dataset, a DataLoader, an iterable of batches, a tensor or a mapping of tensors (see
            `hf_lgelu.refit.batches.read_batches`). Labels, where there are some, only go into the metrics of the
            report. Of several processes each may have all of it, or a share.
        evaluation_data: a second set, in the same forms, on which the networks are compared; the same on every process.
        batch_size: inputs run at once. Default: 1,024 rows of features, 2,048 tokens, 32 images.
        collate: makes a batch of a list of the dataset's items.
        max_units: at most so many rows, sequences or images of `data`.
        kinds: rows of `SMOOTH_KINDS`: which gates become ReLU.
        outputs: names of the model's outputs that count; by default those that its task reads (logits, boxes,
            embeddings), and not hidden states beside them. The first is the one that the networks are compared on.
        max_kl: mean KL to the original, in nats, beyond which there is a warning; of outputs that are no class scores,
            relative error. None for no bound.
        strict: refuse beyond `max_kl`, and where nothing could be measured.
        keep: names of gates that stay smooth; `hf_lgelu.gate_costs` says which cost most. Most configs have one key for
            all gates and cannot say that: then pass `rewrite_config=False`, and load the weights into a model that has
            been given the same gates.
        target: what the gates become, a row of `hf_lgelu.refit.target_gates.TARGETS`: "relu", "relu6", "leaky_relu",
            "hardswish" or "relu2". Of all but ReLU, kinks and slopes are not fitted, and blocks not widened.
        effort: how hard it tries, each rung after the ones before and kept only where held-out inputs are nearer for
            it: "refit", the maps behind the gates (the default); "place", before that each ReLU's kink and slope, about
            as quick again; "blocks", then both maps of every block by Adam, layer by layer; "distill", then all blocks
            by Adam on the whole network's outputs.
        width_budget: with effort "place" and above (which it implies), so many times the units in every block: those
            added are always on and carry what is linear in it. At most as many as the block has inputs. The config says
            the new width; the families whose config has no key for it are refused.
        tolerance: KL in nats to the original (of outputs that are no class scores relative error) on the inputs held
            out: rungs are climbed until it is reached, up to `effort` or, without one, the last.
        max_seconds: no further rung is begun after so long, and the last one takes at most that.
        allow_unrefitted: where a map behind a gate cannot be refitted (shared or tied weights, no linear map), exchange
            the gate all the same and say so in the report.
        rewrite_config: rewrite the config keys that the family uses, so that transformers loads the saved model.
        progress: show a progress bar.

    Raises:
        ValueError: nothing to convert, inputs that do not go together or are fewer than 16 distinct rows, no output of
            a name in `outputs`, or a model that torch.export cannot trace.
        TypeError: a model that is no module, or data of another kind.
        ConversionRefusedError: a map behind a gate cannot be refitted, weights are quantized, numbers are not finite,
            the refit is no nearer to the original than the direct swap, with `strict` further than `max_kl`, or
            `tolerance` is not reached; `report` then says what was tried.
        RuntimeError: wrapped or scripted model, adapters of PEFT that are not merged, or a config without a key that
            says ReLU at these sites.

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
    if max_kl is not None and not max_kl > 0:
        raise ValueError(f"max_kl must be a number above 0 (nats), or None, got {max_kl}")
    reason = why_not_writable(model)
    if reason is not None:
        raise ConversionRefusedError(f"{type(model).__name__} cannot be refitted: {reason}")
    top = check_effort(effort, tolerance, max_seconds)
    if not 1 <= width_budget < math.inf:
        raise ValueError(f"width_budget is a share of the units there are, 1 or more and finite, got {width_budget}")
    _refuse_strings(keep=keep, outputs=outputs)
    gate = check_target(target)
    substitution = TemporaryRelu(
        model, kinds=kinds, make=gate.make, include=None if not keep else lambda name: name not in keep
    )
    sites = _converted_sites(model, kinds, keep)
    state = known_processes()
    folds = deal_folds(
        for_decoder(model, read_batches(data, batch_size=batch_size, collate=collate, max_units=max_units)),
        batch_size=batch_size,
        state=state,
    )
    compared = _require_comparable(model, folds.first.load(), outputs)  # what does not fit is known before the work
    second = _second_set(model, evaluation_data, batch_size, collate, state)
    with evaluation_mode(model):
        attempts = Attempts(
            model, folds, substitution, kinds=kinds, outputs=outputs, allow_unrefitted=allow_unrefitted,
            rewrite_config=rewrite_config, progress=progress and state.is_main_process, width_budget=width_budget,
            max_seconds=max_seconds, target=gate, keep=keep,
        )  # fmt: skip
        efforts = attempts.possible(EFFORTS[: EFFORTS.index(top) + 1], tolerance)
        climbed = climb(efforts, attempts.make, _reached_distance, tolerance=tolerance, max_seconds=max_seconds)
        converted, layers, held_out = climbed.best.model, climbed.best.layers, climbed.best.held_out
        evaluation = None
        if second is not None:
            evaluation = evaluate_conversion(model, converted, substitution, second, outputs)
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
        outputs=compared,
        config_changes=climbed.best.config_changes,
        smooth_calls=tuple(map(str, find_smooth_calls(converted, folds.first.load()[:1].inputs))),
        warnings=(
            *_warnings(folds, layers, held_out, evaluation, max_kl),
            *_elsewhere(model, climbed.best),
            *(() if rewrite_config else _config_left(model)),
        ),
        steps=climbed.steps,
        width_share=climbed.best.width_share,
        target=gate.title,
    )
    _require_better(report)
    if tolerance is not None:
        _require_reached(report, tolerance)
    if strict:
        _require_near(report, max_kl)
    return Conversion(converted, report)


def _require_comparable(model: nn.Module, batch: Batch, outputs: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the outputs that count. Raises ValueError unless the model takes a batch of the data and gives some."""
    (first,) = taken_by(model, [batch], "data")
    return tuple(compared_outputs(model, first[:2].inputs, outputs).tensors)


def _refuse_strings(**names: Any) -> None:
    """Raise TypeError where a string stands for a sequence of names: each of its letters would be taken for one."""
    for argument, given in names.items():
        if isinstance(given, str):
            raise TypeError(f"{argument} must be a sequence of names such as [{given!r}], got the string {given!r}")


def _converted_sites(model: nn.Module, kinds: Sequence[str], keep: Sequence[str]) -> list[ActivationSite]:
    """The gates that are exchanged. Raises ValueError where a name in `keep` is none."""
    sites = find_sites(model, check_kinds(kinds))
    unknown = set(keep) - {site.name for site in sites}
    if unknown:
        named = ", ".join(site.name for site in sites[:4])
        raise ValueError(f"keep: no gate is named {', '.join(sorted(unknown))}; there are {named} and so on")
    return [site for site in sites if site.name not in keep]


def _chosen(names: Sequence[str] | None) -> OutputsOf:
    return lambda output: list(task_outputs(output, names).values())


def _second_set(
    model: nn.Module, data: Any, batch_size: int | None, collate: Callable[[Any], Any] | None, state: PartialState
) -> Iterator[Batch] | None:
    """This process's part of the second set. Raises ValueError where the model does not take it."""
    if data is None:
        return None
    batches = for_decoder(model, read_batches(data, batch_size=batch_size, collate=collate))
    batches = cut_batches(taken_by(model, batches, "evaluation_data"), batch_size)
    return itertools.islice(batches, state.process_index, None, state.num_processes)


class LayerStep(Protocol):
    """What is done to the converted network beside the refits."""

    def begin(self, converted: nn.Module) -> None:
        """Before the first layer."""

    def behind_layer(self, converted: nn.Module, index: int) -> str | None:
        """After the refit of a layer; a note for the report."""


class Reconstruction:
    """The step of effort "blocks": both maps of a block by Adam, then once more the ridge."""

    def __init__(self, carrier: Carrier, sites: Sequence[ActivationSite], extra: int) -> None:
        """`extra` units of each block are always on."""
        self._carrier, self._sites, self._extra = carrier, sites, extra

    def begin(self, converted: nn.Module) -> None:
        """Nothing."""

    def behind_layer(self, converted: nn.Module, index: int) -> str | None:
        """The block of a layer, where it is one; the rows of the first fold decide whether it is kept."""
        block = self._carrier.trace.blocks.get(index)
        if block is None:
            return None
        unseen, *others = [BlockRows.of(parts) for parts in self._carrier.block_rows]
        gate = converted.get_submodule(self._sites[block.unit.site].name)
        done = reconstruct_block(converted, block, gate, BlockRows.of(others), unseen, extra=self._extra)
        if not done.is_kept:
            return "both maps moved: no nearer, taken back"
        layer = self._carrier.layers.layers[index]
        fit, total = fit_layer(layer, block_moments(converted, block, gate, [unseen, *others]))
        write_refit(converted, self._carrier.trace.program, layer, fit, total)
        return f"both maps moved: error times {done.after / done.before:.2f}"


@dataclass(frozen=True)
class Attempt:
    """A converted network, and what was done to it."""

    model: nn.Module
    layers: tuple[LayerRefit, ...]
    held_out: Evaluation | None
    config_changes: tuple[str, ...]
    width_share: float
    moved: tuple[str, ...]
    masks: Mapping[str, Tensor]


class Attempts:
    """Makes the networks of the ladder's rungs, each a new one; the given model stays as it is."""

    def __init__(
        self, model: nn.Module, folds: Folds, substitution: TemporaryRelu, *, kinds: Sequence[str],
        outputs: Sequence[str] | None, allow_unrefitted: bool, rewrite_config: bool, progress: bool,
        width_budget: float, max_seconds: float | None, target: TargetGate, keep: Sequence[str],
    ) -> None:  # fmt: skip
        """As for `convert_to_relu`."""
        self._model, self._folds, self._substitution = model, folds, substitution
        self._kinds, self._outputs = kinds, outputs
        self._allow_unrefitted, self._rewrite_config, self._progress = allow_unrefitted, rewrite_config, progress
        self._width_budget, self._max_seconds, self._target = width_budget, max_seconds, target
        self._keep = keep

    def possible(self, efforts: Sequence[Effort], tolerance: float | None) -> Sequence[Effort]:
        """The rungs that there are inputs for. Raises ValueError where that is not what was asked for."""
        if not self._target.can_be_placed:
            if self._width_budget > 1 or efforts[-1] == "place":
                raise ValueError(
                    f"kinks are placed and blocks widened for ReLU only, not for target={self._target.name!r}; leave "
                    "width_budget out, and take effort='refit', 'blocks' or 'distill'"
                )
            efforts = [effort for effort in efforts if effort != "place"]
        if len(efforts) == 1 and self._width_budget == 1:
            return efforts
        if self._width_budget > 1 and len(efforts) == 1:
            efforts = EFFORTS[:2]
        if not self._folds.held_out_units or len(self._folds.folds) == 1:
            raise ValueError(
                f"more than the refit (effort={efforts[-1]!r}) is only done where inputs can be held out for it: give "
                f"{LEAST_ROWS_TO_HOLD_OUT} rows or more, of several inputs"
            )
        if PartialState().num_processes > 1 and len(efforts) > EFFORTS.index("blocks"):
            raise ValueError(f"effort={efforts[-1]!r} works in one process; start it without a launcher")
        return efforts

    def make(self, effort: Effort, best: Attempt | None) -> Attempt:
        """The network of a rung: distilled from the best one so far, else made from the original."""
        if effort == "distill" and best is not None:
            return self._distilled(best)
        is_placed = effort != "refit" and self._target.can_be_placed
        room = self._room() if is_placed else Room(self._model)
        sites = _converted_sites(room.model, self._kinds, self._keep)
        with evaluation_mode(room.model):
            converted = copy.deepcopy(room.model)
        rewritten = substitute_gates(
            converted, self._target, kinds=self._kinds, rewrite_config=self._rewrite_config, keep=self._keep
        )
        changes = [*map(str, (*room.config_changes, *rewritten)), *forget_quantizer(converted)]
        carrier = Carrier(
            room.model,
            converted,
            sites,
            self._folds,
            _chosen(self._outputs),
            gate_maps_change=effort != "refit",
            whole_blocks=effort == "blocks",
        )
        program, found = carrier.trace.program, carrier.layers
        steps: list[LayerStep] = []
        if is_placed:
            steps.append(Preparation(room.model, sites, self._folds, program, found, room.extra))
        if effort == "blocks":
            steps.append(Reconstruction(carrier, sites, room.extra))
        layers = _refit(carrier, converted, self._allow_unrefitted, self._progress, steps)
        units = find_gate_units(program)
        moved = dict.fromkeys(name for unit in units for name in unit.parameters)
        moved |= dict.fromkeys(
            name for layer in found.layers for consumer in layer.maps for name in consumer.parameters
        )
        masks: dict[str, Tensor] = {}
        for block in find_blocks(program, found.layers, units) if room.extra else ():
            masks |= movable(converted, block, room.extra)
        return Attempt(
            converted, tuple(layers), self._evaluated(converted), tuple(changes), room.share, tuple(moved), masks
        )

    def _room(self) -> Room:
        with evaluation_mode(self._model):
            sites = _converted_sites(self._model, self._kinds, self._keep)
            program = Program(self._model, sites, self._folds.first.load().inputs, _chosen(self._outputs))
            found = find_layers(program, self._model, sites)
            try:
                return make_room(self._model, program, found.layers, len(sites), self._width_budget)
            except UnsupportedConfigError as error:
                raise ConversionRefusedError(
                    f"width_budget={self._width_budget:g}: {error}. Use width_budget=1"
                ) from error

    def _distilled(self, best: Attempt) -> Attempt:
        converted = copy.deepcopy(best.model)
        distill(
            self._model,
            converted,
            self._folds,
            self._outputs,
            names=best.moved,
            masks=best.masks,
            max_seconds=self._max_seconds,
        )
        return replace(best, model=converted, held_out=self._evaluated(converted))

    def _evaluated(self, converted: nn.Module) -> Evaluation | None:
        batches = (batch.load() for batch in self._folds.held_out)
        return evaluate_conversion(self._model, converted, self._substitution, batches, self._outputs)


def _refit(
    carrier: Carrier,
    converted: nn.Module,
    allow_unrefitted: bool,
    progress: bool,
    steps: Sequence[LayerStep] = (),
) -> list[LayerRefit]:
    """Refit `converted` in place, layer after layer, and let `steps` do their part; what was done to each."""
    with carrier:
        found, names = carrier.layers, carrier.site_names
        _refuse_unfit(type(converted).__name__, found, allow_unrefitted)
        for step in steps:
            step.begin(converted)
        done = [_kept(unfit.name, unfit.sites, f"not refitted: {unfit.reason}", names) for unfit in found.unfit]
        done += [_kept(names[index], (index,), "no output that counts depends on it", names) for index in found.beside]
        with tqdm(
            total=len(found.layers) * carrier.steps_per_layer, desc="refit", unit="batch", disable=not progress
        ) as bar:
            for index, layer in enumerate(found.layers):
                bar.set_postfix_str(layer.maps[0].name)
                fit, total = fit_layer(layer, carrier.moments(index, bar.update))
                write_refit(converted, carrier.trace.program, layer, fit, total)
                notes = [step.behind_layer(converted, index) for step in steps]
                done.append(_described(layer, fit, total, names, filter(None, notes)))
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


def _kept(name: str, sites: Sequence[int], note: str, names: Sequence[str]) -> LayerRefit:
    return LayerRefit((name,), tuple(names[index] for index in sites), "kept", None, None, None, 0, 0, note)


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


def _elsewhere(model: nn.Module, attempt: Attempt) -> tuple[str, ...]:
    """What other programs make of a config that now says ReLU."""
    return runtime_warnings(getattr(model, "config", None)) if attempt.config_changes else ()


def _config_left(model: nn.Module) -> Iterator[str]:
    """What becomes of the result where it is saved with a config that still names the gates that it had."""
    for _, root in pretrained_roots(model):
        yield (
            f"rewrite_config=False: the config of {type(root).__name__} names the gates from before. Saved and loaded "
            "by it, these stand before the refitted weights, another network, without an error; load the weights into "
            "a model that has been given the gates of this one"
        )


def _reached_distance(attempt: Attempt) -> float | None:
    return None if attempt.held_out is None else _distance(attempt.held_out.refitted)


def _require_reached(report: ConversionReport, tolerance: float) -> None:
    """Raise where no rung of the ladder came as near to the original as was asked for."""
    reached = None if report.held_out is None else _distance(report.held_out.refitted)
    if reached is None or not reached <= tolerance:
        tried = ", ".join(f"{step.effort} {significant(step.distance)}" for step in report.steps)
        raise ConversionRefusedError(
            f"the network was to be within {tolerance:g} of the original on the inputs held out; the nearest was "
            f"{significant(reached)} ({tried}). Give more inputs, a width_budget above 1 or more seconds, or "
            "train the model with hardening. The model is as it was",
            report,
        )


def _warnings(
    folds: Folds,
    layers: Sequence[LayerRefit],
    held_out: Evaluation | None,
    second: Evaluation | None,
    max_kl: float | None,
) -> Iterator[str]:
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
    for title, evaluation in ((HELD_OUT, held_out), (SECOND_SET, second)):
        if evaluation is not None and max_kl is not None and _distance(evaluation.refitted) > max_kl:
            yield (
                f"on the {title} the converted network is {distance_in_words(evaluation.refitted)} away from the "
                f"original, beyond max_kl = {max_kl:g}: measure what that costs before you use it"
            )
    starved = [layer for layer in layers if layer.note and "starved" in layer.note]
    if starved:
        worst = min(starved, key=lambda layer: layer.rows / layer.width)
        yield (
            f"{len(starved)} of {len(layers)} layers are starved, fitted on fewer than {ENOUGH_ROWS} rows a feature "
            f"(most of all {worst.layers[0]}: {worst.rows:,} rows, {worst.width:,} features); give more inputs"
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
    direct, refitted = report.held_out.direct, report.held_out.refitted
    if not _distance(refitted) < _distance(direct) and not _distance(refitted) == _distance(direct) == 0:
        raise ConversionRefusedError(
            f"on {report.held_out.rows:,} rows that were held out, the refitted network is no nearer to the original "
            f"({distance_in_words(refitted)}) than the direct swap ({distance_in_words(direct)}); give more inputs, "
            "from where the model is used. The model is as it was",
            report,
        )


def _require_near(report: ConversionReport, max_kl: float | None) -> None:
    """Raise where the network is further from the original than the bound on any set, or on none was measured."""
    measured = [evaluation.refitted for _, evaluation in evaluations(report)]
    if measured and (max_kl is None or all(_distance(change) <= max_kl for change in measured)):
        return
    raise ConversionRefusedError(
        f"{how_far(report)} strict=True wants a measured distance"
        + ("" if max_kl is None else f" of at most max_kl = {max_kl:g}")
        + "; give more inputs, or train the model with hardening. The model is as it was",
        report,
    )


def _distance(change: NetChange) -> float:
    return change.relative_error if change.kl is None else change.kl
