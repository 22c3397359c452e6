"""A trained smooth network as a ReLU network, without training: seconds for BERT, 38 minutes for SmolLM2.

Every smooth gate becomes ReLU. The linear maps after the gates are refitted, layer by layer (`Refit.make` in
`layerwise.py`), by ridge regression on unlabelled samples. Features come from the student, aims from the original.
"""

import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from hf_lgelu.graph.layers import find_layers
from hf_lgelu.models.copies import (
    ComputedWeight,
    changeable_module,
    compute_again,
    with_plain_weights,
    with_values_in_memory,
)
from hf_lgelu.models.graph_gates import with_gate_modules
from hf_lgelu.networks.batches import read_batches
from hf_lgelu.networks.calls import CALLED_KINDS, GatesAsModules
from hf_lgelu.networks.smooth_calls import find_smooth_calls
from hf_lgelu.processes import known_processes
from hf_lgelu.refit.config import EFFORTS, RUNGS, ConversionConfig
from hf_lgelu.refit.distill import Distill
from hf_lgelu.refit.folds import LEAST_ROWS_TO_HOLD_OUT, Folds, SecondSet, deal_folds, load_own
from hf_lgelu.refit.layerwise import Refit
from hf_lgelu.refit.place import Place
from hf_lgelu.refit.refusals import can_take_steps, require_comparable, require_gates, require_refittable
from hf_lgelu.refit.report import ConversionReport, StepTaken, with_live_units
from hf_lgelu.refit.samples import TEXTS, read_samples, sampled_text
from hf_lgelu.refit.task import Student, Task, choose_exchange
from hf_lgelu.refit.verdict import config_warnings, conversion_warnings, own_text_warning, require_good, unread_warning
from hf_lgelu.refit.widen import blocks_to_widen

RUNG_CLASSES: dict[str, type[Refit] | type[Distill]] = {cls.effort: cls for cls in (Refit, Place, Distill)}
"""The class that makes the network of each row of RUNGS."""


class Conversion(NamedTuple):
    """The result of `convert_to_relu`: the new model, and the report."""

    model: nn.Module
    report: ConversionReport


def convert_to_relu(
    model: nn.Module,
    data: Any = None,
    *,
    effort: str | None = None,
    width: float | None = None,
    keep: Sequence[str] | None = None,
    evaluation_data: Any = None,
    options: ConversionConfig | None = None,
    progress: bool | None = None,
) -> Conversion:
    """The same architecture with ReLU gates and refitted weights, in eval mode; `model` stays as it is.

    With 64 distinct rows or more (16 images or graphs), a part is held out, and there the refit must be nearer to the
    original than the plain swap. The network can still be far from the original. The report shows the distance, with
    labels in the network's own measure, and warns beyond `max_kl`. Samples do not show whether they are like the inputs
    in use: give a second set as `evaluation_data`. In a process group (`accelerate launch`) every process must call.
    The work is shared, and each process gets the same model.

    Args:
        model: a trained module: from transformers or timm, your own, or a SentenceTransformer (compared on its
            embeddings). Gates are modules or calls in a forward (`F.gelu(x)`). In the place of a call, the copy runs
            the new gate in memory, and the report names the line to write it in. The first linear maps after each gate
            are refitted: Linear, Conv1D, convolutions with any stride and groups, also transposed, the joint ones of a
            downsampling block, the second half of a gated unit. A norm or a factor may compute their weights.
        data: unlabelled inputs: a dataset, a DataLoader, an iterable of batches, a tensor or a mapping of tensors (see
            `hf_lgelu.networks.batches.read_batches`). Labels only go into the metrics of the report. Each of several
            processes gets all data. Sequences of different lengths run alone without an attention mask. With one they
            are padded with the config's token, on the side of the padding that some have, else at the end. None for a
            causal language model: it samples 8,192 tokens of text itself.
        effort: the last rung to try: "refit" (the default), "place" or "distill"; see `ConversionConfig`.
        width: how many times the hidden units every block gets; a larger width brings the network nearer. 1 by default.
        keep: names of gates that stay smooth. None by default.
        evaluation_data: a second set, in the same forms, on which the networks are compared; the same on every process.
            A warning counts the samples that are also in `data`.
        options: the other options, and defaults of the options above.
        progress: print a line per layer on stderr. By default only where stderr is a terminal; elsewhere the lines go
            to the logger "hf_lgelu.progress", at level INFO.

    Raises:
        ValueError: nothing to convert, inputs that do not go together or are fewer than 16 distinct rows, sequences of
            different lengths whose padding changes the model's outputs, or no output of a name in `outputs`.
        TypeError: data of another kind.
        ConversionRefusedError: weights are quantized, numbers are not finite, or a gate works in place on an input that
            is used again. It is also raised if the refit is no nearer to the original than the plain swap, or if
            the distance is above `max_kl` with `strict`. In these cases `report` holds the measurements, and `model` is
            the best network.
        RuntimeError: wrapped model, adapters of PEFT that are not merged, or a config without a key that
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
    given: dict[str, Any] = dict(effort=effort, width=width, keep=keep)
    config = replace(options or ConversionConfig(), **{name: each for name, each in given.items() if each is not None})
    model, computed = with_plain_parts(model, config)
    processes = known_processes()
    shown = (sys.stderr.isatty() if progress is None else progress) and processes.is_main_process
    with GatesAsModules(model, config.kinds, config.outputs, config.box_channels) as network:
        started = time.perf_counter()
        task = prepare(network, data, config, shown)
        second, warnings = None, task.warnings
        if evaluation_data is not None:
            reading = {"batch_size": config.batch_size, "data_collator": config.data_collator}
            second = SecondSet(model, evaluation_data, task.folds, **reading)
            warnings += require_comparable(network.read, second.first, "evaluation_data")
        best, steps = climb(build_rungs(task))
        warnings += compute_again(best.model, computed)

        report = report_of(task, best, steps, second, started)
    warnings += tuple(unread_warning(best.layers, task.few))
    warnings += tuple(conversion_warnings(report, config.max_kl))
    warnings += tuple(config_warnings(best.model, best.config_changes))
    report = replace(report, warnings=warnings)
    require_good(report, best.model, config)
    return Conversion(best.model, report)


def with_plain_parts(model: nn.Module, config: ConversionConfig) -> tuple[nn.Module, list[ComputedWeight]]:
    """(the model as a conversion reads it, the weights that norms compute in the given one).

    All values are in memory. A graph of torch.fx has modules in the place of its formulas of gates, and layers have
    plain weights. A model that needs none of this is itself.
    """
    model = with_values_in_memory(changeable_module(model))
    return with_plain_weights(with_gate_modules(model, config.kinds or CALLED_KINDS))


def prepare(network: GatesAsModules, data: Any, config: ConversionConfig, progress: bool = False) -> Task:
    """The samples in folds and the gates to exchange. Raises the errors of `convert_to_relu` about model and data."""
    model = network.model
    require_refittable(model, config)
    warnings: tuple[str, ...] = ()
    if data is None:
        texts = config.max_samples or TEXTS
        config, data = replace(config, max_samples=texts), {"input_ids": sampled_text(model, texts)}
        warnings = (own_text_warning(data["input_ids"]),)
    batches = read_batches(
        data,
        model=model,
        max_samples=config.max_samples,
        batch_size=config.batch_size,
        data_collator=config.data_collator,
    )
    samples = read_samples(batches, model=model)
    warnings += require_comparable(network.read, samples.batches[0], "data")
    network.take_calls(samples.few.inputs)
    require_gates(model, samples.few.inputs, config)
    folds = deal_folds(samples, network.read, batch_size=config.batch_size, is_choice=len(config.rungs) > 1)
    return Task(network.read, folds, choose_exchange(network.read, folds, config), config, progress, warnings)


def possible_rungs(task: Task) -> list[str]:
    """All rungs that the model can take and that there are enough samples for."""
    if not task.folds.held_out_samples or len(task.folds.folds) == 1:
        return [EFFORTS[0]]
    every = replace(task.config, effort=EFFORTS[-1]).rungs
    return [effort for effort in every if can_take_steps(task.model) or not RUNGS[effort].takes_steps]


def build_rungs(task: Task) -> list[Any]:
    """The rungs that the options ask for. Raises ValueError where no samples are held out for them."""
    asked = task.config.rungs
    if len(asked) > 1 and len(possible_rungs(task)) == 1:
        raise ValueError(
            f"more than the refit (`effort` {asked[-1]!r}) is only done where inputs can be held out for it: give "
            f"{LEAST_ROWS_TO_HOLD_OUT} rows or more, of several inputs"
        )
    return [RUNG_CLASSES[effort](task) for effort in asked]


def climb(rungs: Sequence[Any]) -> tuple[Student, tuple[StepTaken, ...]]:
    """(the nearest student, a record of each rung).

    A rung has an `effort`, a key of RUNGS, and a method `make(best)`. `make` gives a new student; `best` is the nearest
    student so far, None on the first rung.
    """
    best: Student | None = None
    steps: list[StepTaken] = []
    for rung in rungs:
        begun = time.perf_counter()
        student = rung.make(best)
        is_better = best is None or is_nearer(student.gaps, best.gaps, RUNGS[rung.effort].standard_errors)
        best = student if is_better else best
        distance = None if student.held_out is None else student.held_out.refitted.value
        steps.append(StepTaken(rung.effort, distance, is_better, time.perf_counter() - begun))
    return cast(Student, best), tuple(steps)


def further_ways(task: Task, steps: Sequence[StepTaken]) -> tuple[str | None, bool]:
    """(the first possible rung above the last one, or None at the top; whether `width` may still make blocks wider)."""
    possible, higher = possible_rungs(task), EFFORTS[EFFORTS.index(steps[-1].effort) + 1 :]
    following = next((effort for effort in possible if effort in higher), None)
    if "place" not in possible or task.config.width > 1:
        return following, False
    recording = task.recordings.of(task.folds.first)
    layers = find_layers(recording, task.model, task.recordings.sites)
    return following, bool(blocks_to_widen(task.model, recording, layers))


def is_nearer(gaps: Sequence[float], than: Sequence[float], standard_errors: float = 0.0) -> bool:
    """Whether the mean difference is below zero by more than `standard_errors` of its standard errors.

    `gaps` are a network's distances from the original, one per sample; `than` are another network's on the same
    samples. A network whose outputs are finite is nearer than one whose outputs are not. A single sample has no
    standard error, and is not enough where standard errors are required.

    >>> is_nearer([1.0, 1.1, 0.9, 1.0, 0.0], than=[1.0, 1.1, 0.9, 1.0, 99.0])
    True
    >>> is_nearer([1.0, 1.1, 0.9, 1.0, 0.0], than=[1.0, 1.1, 0.9, 1.0, 99.0], standard_errors=2)
    False
    """
    if not all(map(math.isfinite, than)):
        return all(map(math.isfinite, gaps))
    if not gaps or (standard_errors and len(gaps) == 1):
        return False
    changes = torch.tensor(gaps, dtype=torch.float64) - torch.tensor(than, dtype=torch.float64)
    margin = standard_errors * changes.std().item() / len(changes) ** 0.5 if standard_errors else 0.0
    return bool(changes.mean() < -margin)


def still_smooth(model: nn.Module, folds: Folds) -> tuple[str, ...]:
    """The smooth operations that run, in words; some run in large batches only."""
    loads = itertools.chain([folds.samples.few.inputs], (batch.load().inputs for batch in folds.held_out))
    calls = {
        (call.module, call.operation, call.line): call for inputs in loads for call in find_smooth_calls(model, inputs)
    }
    return tuple(map(str, calls.values()))


def report_of(
    task: Task, best: Student, steps: tuple[StepTaken, ...], second: SecondSet | None, started: float
) -> ConversionReport:
    """The report on the data, the gates, the nearest network and the rungs, without warnings.

    `started` is the time by `time.perf_counter` at which the work began.
    """
    folds, exchange = task.folds, task.exchange
    is_apart = folds.choosing != folds.held_out  # other samples chose the network
    held_out = task.evaluate(best.model, load_own(folds.held_out))[0] if is_apart else best.held_out
    layers, live_units = with_live_units(best.layers, held_out)
    is_refitted = any(layer.rows for layer in layers)
    next_step, can_be_wider = further_ways(task, steps) if is_refitted else (None, False)
    return ConversionReport(
        model=type(task.model).__name__,
        gates={site.name: site.module._get_name() for site in exchange.sites(task.model)},
        kept={name: task.model.get_submodule(name)._get_name() for name in exchange.keep},
        layers=layers,
        live_units=live_units,
        held_out=held_out,
        choosing_samples=sum(map(len, folds.choosing)) if is_apart else 0,
        evaluation=None if second is None else task.evaluate(best.model, second)[0],
        repeated=0 if second is None else second.repeated(),
        samples=folds.samples.given,
        distinct_samples=len(folds.samples.keys),
        rows=folds.rows,
        folds=len(folds.folds),
        config_changes=best.config_changes,
        width_share=best.width_share,
        steps=steps,
        next_step=next_step,
        can_be_wider=can_be_wider,
        config=task.config.to_dict(),
        outputs=tuple(task.few.tensors),
        left_out=task.few.left_out,
        smooth_calls=still_smooth(best.model, folds),
        seconds=time.perf_counter() - started,
    )
