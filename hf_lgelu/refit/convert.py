"""A trained smooth network as a ReLU network, in seconds and without training.

Every smooth gate becomes ReLU, and the linear maps behind the gates are refitted, layer by layer, by ridge regression
towards their own weights on a few thousand unlabelled inputs: features of the network under way, targets of the
original.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from torch import nn

from hf_lgelu.models.config_keys import pretrained_roots
from hf_lgelu.models.example_run import evaluation_mode
from hf_lgelu.models.operable import operable_module
from hf_lgelu.models.own_forward import own_forward
from hf_lgelu.models.runtimes import runtime_warnings
from hf_lgelu.models.sites import SMOOTH_KINDS, ActivationSite, find_sites
from hf_lgelu.models.smooth_calls import find_smooth_calls
from hf_lgelu.models.temporary_relu import TemporaryRelu
from hf_lgelu.refit.attempts import Attempt, Attempts, converted_sites
from hf_lgelu.refit.batches import Batch, for_decoder, read_batches, taken_by
from hf_lgelu.refit.compare import compared_outputs, evaluate_conversion
from hf_lgelu.refit.folds import Folds, deal_folds
from hf_lgelu.refit.gap import some_held_out, with_returns
from hf_lgelu.refit.gate_costs import check_keep, swap_costs
from hf_lgelu.refit.ladder import EFFORTS, Metric, check_effort, climb, next_rung
from hf_lgelu.refit.nearer import is_nearer
from hf_lgelu.refit.processes import each_has, known_processes
from hf_lgelu.refit.progress import Progress
from hf_lgelu.refit.report import ConversionReport
from hf_lgelu.refit.resume import fingerprint, work_in
from hf_lgelu.refit.target_gates import FITTED_SLOPE, TargetGate, check_target, fit_slope
from hf_lgelu.refit.thinning import share_of_zeros
from hf_lgelu.refit.units import cut_batches, unit_keys
from hf_lgelu.refit.verdict import (
    ConversionRefusedError,
    conversion_warnings,
    require_good,
)
from hf_lgelu.refit.weights import why_not_writable

_UNITS_TO_RANK = 64  # inputs, about, on which gates are ranked by what they cost


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
    keep: int | Sequence[str] = (),
    target: str = "relu",
    zeros: float | None = None,
    effort: str | None = None,
    width_budget: float = 1.0,
    tolerance: float | None = None,
    metric: Callable[[nn.Module], float] | None = None,
    max_seconds: float | None = None,
    distill_steps: int | None = None,
    bf16: bool = False,
    checkpoint_dir: str | os.PathLike | None = None,
    allow_unrefitted: bool = False,
    rewrite_config: bool = True,
    progress: bool = False,
) -> Conversion:
    """The same architecture with ReLU gates and refitted weights, in eval mode; `model` stays as it is.

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
            What it has in common with `data` is counted in a warning.
        batch_size: inputs run at once. Default: 1,024 rows of features, 2,048 tokens, 32 images.
        collate: makes a batch of a list of the dataset's items.
        max_units: at most so many rows, sequences or images of `data`.
        kinds: rows of `SMOOTH_KINDS`: which gates become ReLU.
        outputs: names of the model's outputs that count; by default those that its task reads (logits, boxes,
            embeddings), and not hidden states beside them. The first is the one that the networks are compared on. A
            tensor without a name counts as class scores: values (a regression) need one, as in {"values": output}.
        max_kl: mean KL to the original, in nats, beyond which there is a warning; of outputs that are no class scores,
            relative error. None for no bound.
        strict: refuse beyond `max_kl`, and where nothing could be measured.
        keep: names of gates that stay smooth, or how many: those that cost the most when each alone is exchanged
            (`hf_lgelu.gate_costs`). Most configs have one key for all gates and cannot say that: the saved one then
            names the kept gates, `hf_lgelu.from_pretrained` rebuilds them, and without this package it is refused.
        target: what the gates become, a row of `hf_lgelu.refit.target_gates.TARGETS`: "relu", "relu6", "leaky_relu",
            "hardswish" or "relu2"; "leaky_relu:0.1" has another slope than 0.01, "leaky_relu:fitted" the one that is
            nearest to the gates. No config can say a slope: it is saved as kept gates are. Of all but ReLU, kinks and
            slopes are not fitted per channel, and blocks not widened.
        zeros: the share of zeros, 0 to 1, that is wanted behind every gate, for what skips work on them: each channel's
            kink goes up to that quantile of its inputs, into the bias before the gate, and the maps behind are refitted
            to that. Of targets that have zeros, with effort "refit" alone. The report says what is reached.
        effort: how hard it tries, each rung after the ones before and kept only where held-out inputs are nearer for
            it: "refit", the maps behind the gates (the default); "place", before that each ReLU's kink and slope, about
            as quick again; "blocks", then both maps of every block by Adam, layer by layer; "distill", then all blocks
            by Adam on the whole network's outputs, kept where it is nearer by more than two standard errors.
        width_budget: with effort "place" and above (which it implies), so many times the units in every block: those
            added carry what is linear in it, or are copies of a unit with kinks of their own. The larger, the nearer,
            up to six times and as many units as the block has inputs. The config says the new width; families whose
            config has no key for it are refused.
        tolerance: KL in nats to the original (of outputs that are no class scores relative error) on the inputs held
            out: rungs are climbed until it is reached, up to `effort` or, without one, the last. With `metric`, the
            share of the original's score that may be lost.
        metric: your own measure of a model, higher is better: `metric(model)` is called with the original and with the
            network of each rung, both in eval mode, and decides which rung is kept (KL where scores are equal). Of
            several processes the main one's value counts.
        max_seconds: rungs above the first end after so long, and none is begun that takes longer than what is left;
            what was reached by then is the result.
        distill_steps: of one batch each; by default 200, and 600 where the first few take a tenth of the gap away. A
            dial for how close, in the same shape: thousands pay where there are inputs enough.
        bf16: take the steps of "distill" under autocast, with products in bfloat16: two to four times as quick on
            processors and GPUs that have it, for networks of some hundred units and more. What they lead to is judged,
            and saved, in the model's own precision.
        checkpoint_dir: a folder for what is done layer by layer, and of "distill" for its last steps (not with
            `max_seconds`). A conversion that was killed, called again with the same model, data and arguments, goes on
            from there, to the same result; the folder of another one, or of more or fewer processes, is refused. All
            processes must see it. Delete it when the model is saved.
            `effort`, `tolerance`, `metric`, the steps and the bounds may differ.
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
            `tolerance` is not reached; `report` then says what was tried, and `model` is the best that was reached.
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
    _require_convertible(model, kinds, metric, outputs)
    top = check_effort(effort, width_budget, tolerance=tolerance, max_seconds=max_seconds, max_kl=max_kl)
    _check_distillation(top, distill_steps, bf16, model)
    gate = check_target(target)
    if zeros is not None and not (gate.has_zeros and isinstance(zeros, float) and 0 < zeros < 1):
        raise ValueError(f"zeros must be a share between 0 and 1, of a target that has some, got {zeros!r}, {target!r}")
    keep = check_keep(keep, [site.name for site in find_sites(model, kinds)])
    state = known_processes()
    folds = deal_folds(
        for_decoder(model, read_batches(data, batch_size=batch_size, collate=collate, max_units=max_units)),
        batch_size=batch_size,
        state=state,
    )
    compared = _require_comparable(model, folds.first.load(), outputs)  # what does not fit is known before the work
    second = _second_set(model, evaluation_data, batch_size, collate, state, folds)
    with _plain_calls(model), evaluation_mode(model):
        if target == FITTED_SLOPE:
            gate = check_target(
                target, lambda: fit_slope(model, kinds, () if isinstance(keep, int) else keep, _some(folds))
            )
        kept = _dearest(model, folds, kinds, outputs, gate, keep) if isinstance(keep, int) else keep
        sites = converted_sites(model, kinds, kept)
        substitution = TemporaryRelu(model, kinds=kinds, make=gate.make, include=lambda name: name not in kept)
        lost = None if metric is None else Metric(metric, model).lost
        decisive = {"kinds": tuple(kinds), "outputs": outputs, "keep": kept, "target": target, "zeros": zeros,
                    "width_budget": width_budget, "allow_unrefitted": allow_unrefitted}  # fmt: skip
        bars = Progress(progress and state.is_main_process)
        mark = "" if checkpoint_dir is None else fingerprint(model, folds, **decisive)
        with work_in(checkpoint_dir, mark) as work:
            attempts = Attempts(
                model, folds, substitution, kinds=kinds, outputs=outputs, allow_unrefitted=allow_unrefitted,
                rewrite_config=rewrite_config, progress=bars, width_budget=width_budget, max_seconds=max_seconds,
                target=gate, keep=kept, work=work, zeros=zeros, distill_steps=distill_steps, bf16=bf16,
            )  # fmt: skip
            efforts = attempts.possible(EFFORTS[: EFFORTS.index(top) + 1], tolerance)
            bars.plan(efforts)
            best, steps = climb(
                efforts, attempts.make, _reached_distance, tolerance=tolerance, max_seconds=max_seconds,
                nearer=lambda found, best: is_nearer(found.gaps, best.gaps, found.standard_errors),
                lost=lambda attempt: None if lost is None else lost(attempt.model),
            )  # fmt: skip
        layers = with_returns(model, best.model, best.layers, best.scaled, folds, outputs)
        shares = _zeros_behind(model, best.model, sites, substitution, some_held_out(folds) if gate.has_zeros else [])
        evaluation = None if second is None else evaluate_conversion(model, best.model, substitution, second, outputs)
        repeated = 0 if second is None else sum(each_has(second.repeated))
    warnings = conversion_warnings(
        folds, layers, best.held_out, evaluation, max_kl, swap_is_rival=zeros is None,
        is_distilled=any(step.effort == "distill" and step.is_kept for step in steps),
        is_bare=compared == ("",), repeated=repeated,
    )  # fmt: skip
    report = ConversionReport(
        model=type(model).__name__,
        gates={site.name: type(site.module).__name__ for site in sites},
        kept={name: type(model.get_submodule(name)).__name__ for name in kept},
        layers=tuple(layers),
        held_out=best.held_out,
        evaluation=evaluation,
        repeated=repeated,
        units=folds.units.given,
        distinct_units=len(folds.units.keys),
        rows=folds.rows,
        folds=len(folds.folds),
        seconds=time.perf_counter() - started,
        outputs=compared,
        config_changes=best.config_changes,
        smooth_calls=tuple(map(str, find_smooth_calls(best.model, folds.first.load()[:1].inputs))),
        warnings=(*warnings, *_elsewhere(model, best), *(() if rewrite_config else _config_left(model))),
        steps=steps,
        width_share=best.width_share,
        target=gate.title,
        zeros=shares,
        zeros_wanted=zeros,
        # What was restored took no time that says anything.
        next_step=None if work.is_taken_up else next_rung(steps, attempts.rungs),
    )
    require_good(report, best.model, tolerance=tolerance, strict=strict, max_kl=max_kl, swap_is_rival=zeros is None)
    return Conversion(best.model, report)


def _require_convertible(model: nn.Module, kinds: Sequence[str], metric: Any, outputs: Sequence[str] | None) -> None:
    """Raise what `convert_to_relu` says it raises of these."""
    reason = why_not_writable(model)
    if reason is not None:
        raise ConversionRefusedError(f"{type(model).__name__} cannot be refitted: {reason}")
    if metric is not None and not callable(metric):
        raise TypeError(f"metric must be a function of a model that gives a number, got {metric!r}")
    _refuse_strings(outputs=outputs)
    TemporaryRelu(model, kinds=kinds)  # raises where there is no gate


def _check_distillation(top: str, steps: int | None, bf16: bool, model: nn.Module) -> None:
    """Raise ValueError for options that no rung up to `top` has, for a number of steps that is none, and for weights in
    float16: Adam's squares of their gradients are 0 there, and its steps infinite."""
    for name, given, left_out in (("distill_steps", steps, None), ("bf16", bf16, False)):
        if given != left_out and top != "distill":
            raise ValueError(f"{name}={given!r} is for effort='distill', and the last rung asked for is {top!r}")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"distill_steps must be a whole number from 1 on, got {steps!r}")
    if top == "distill" and any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise ValueError(
            "effort='distill' takes steps of Adam, and in float16 they are not finite: convert model.float() or "
            "model.bfloat16() (the result may be cast back), or stop at effort='blocks'"
        )


@contextmanager
def _plain_calls(model: nn.Module) -> Iterator[None]:
    """The model as it is, whatever the caller is in.

    What is compiled (`model.compile()`) runs eagerly inside, for its code looks at no hook; autocast, also what
    accelerate leaves around a model's forward, would put casts between the weights and their use; in inference mode
    nothing has gradients.
    """
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    with ExitStack() as stack:
        stack.enter_context(own_forward(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.inference_mode(False))
        if torch.amp.is_autocast_available(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _zeros_behind(
    model: nn.Module,
    converted: nn.Module,
    sites: Sequence[ActivationSite],
    substitution: TemporaryRelu,
    batches: Sequence[Batch],
) -> tuple[float, float] | None:
    """The share of zeros behind the gates, of the direct swap and of `converted`; None without inputs."""
    names = [site.name for site in sites]
    with substitution.applied():
        before = share_of_zeros(model, names, batches)
    after = share_of_zeros(converted, names, batches)
    return None if before is None or after is None else (before, after)


def _dearest(
    model: nn.Module,
    folds: Folds,
    kinds: Sequence[str],
    outputs: Sequence[str] | None,
    gate: TargetGate,
    count: int,
) -> tuple[str, ...]:
    """Names of the gates that cost the most, in forward order of registration, the same on every process."""
    if not count:
        return ()
    dearest = set(list(swap_costs(model, _some(folds), kinds, outputs, gate.make))[:count])
    return tuple(site.name for site in find_sites(model, kinds) if site.name in dearest)


def _some(folds: Folds) -> list[Batch]:
    """Batches of this process's folds, enough to look at the gates: of long sequences as of short ones."""
    first = folds.spread
    some: list[Batch] = []
    for batch in [*first, *(other for fold in folds.folds for other in fold if other not in first)]:
        if sum(map(len, some)) < _UNITS_TO_RANK:
            some.append(batch.load())
    return some


def _require_comparable(model: nn.Module, batch: Batch, outputs: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the outputs that count. Raises ValueError unless the model takes a batch of the data and gives some."""
    (first,) = taken_by(model, [batch], "data")
    return tuple(compared_outputs(model, first[:2].inputs, outputs).tensors)


def _refuse_strings(**names: Any) -> None:
    """Raise TypeError where a string stands for a sequence of names: each of its letters would be taken for one."""
    for argument, given in names.items():
        if isinstance(given, str):
            raise TypeError(f"{argument} must be a sequence of names such as [{given!r}], got the string {given!r}")


class _SecondSet:
    """This process's part of the second set, batch by batch; `repeated` counts what was fitted or chosen on as well."""

    def __init__(self, batches: Iterator[Batch], folds: Folds) -> None:
        self._batches, self._known = batches, frozenset(folds.units.keys)
        self.repeated = 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self.repeated += sum(key in self._known for key in unit_keys(batch))
            yield batch


def _second_set(
    model: nn.Module,
    data: Any,
    batch_size: int | None,
    collate: Callable[[Any], Any] | None,
    state: PartialState,
    folds: Folds,
) -> _SecondSet | None:
    """None without one. Raises ValueError where the model does not take it."""
    if data is None:
        return None
    batches = for_decoder(model, read_batches(data, batch_size=batch_size, collate=collate))
    batches = cut_batches(taken_by(model, batches, "evaluation_data"), batch_size)
    return _SecondSet(itertools.islice(batches, state.process_index, None, state.num_processes), folds)


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
    return None if attempt.held_out is None else attempt.held_out.refitted.distance
