"""A trained smooth network as a ReLU network, in seconds and without training.

Every smooth gate becomes ReLU, and the linear maps behind the gates are refitted, layer by layer, by ridge regression
towards their own weights on a few thousand unlabelled inputs: features of the network under way, targets of the
original.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from hf_lgelu.models.operable import operable_module
from hf_lgelu.models.own_forward import looked_at
from hf_lgelu.models.sites import SMOOTH_KINDS, find_sites
from hf_lgelu.models.smooth_calls import find_smooth_calls
from hf_lgelu.models.substitution import TemporaryRelu
from hf_lgelu.refit.attempts import Attempts
from hf_lgelu.refit.batches import TRIED, Batch, for_decoder, read_batches, taken_by
from hf_lgelu.refit.compare import compared_outputs, evaluate_conversion, labels_fit
from hf_lgelu.refit.dials import FAR_KL, Dials
from hf_lgelu.refit.distill import can_be_distilled
from hf_lgelu.refit.exchange import plan_exchange
from hf_lgelu.refit.folds import SecondSet, deal_folds
from hf_lgelu.refit.gate_costs import check_keep
from hf_lgelu.refit.ladder import Metric, next_rung
from hf_lgelu.refit.processes import known_processes
from hf_lgelu.refit.report import ConversionReport
from hf_lgelu.refit.resume import Mark, work_in
from hf_lgelu.refit.verdict import (
    ConversionRefusedError,
    config_warnings,
    conversion_warnings,
    require_good,
    uncounted_warnings,
)
from hf_lgelu.refit.weights import why_not_writable


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
    max_kl: float | None = FAR_KL,
    strict: bool = False,
    keep: int | Sequence[str] = (),
    target: str = "relu",
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
            report. Of several processes each may have all of it, or a share. Sequences of different lengths need an
            attention mask; they are padded as the config says, where the model's outputs bear it, and no further
            than those beside them, where its outputs bear that.
        evaluation_data: a second set, in the same forms, on which the networks are compared; the same on every process.
            What it has in common with `data` is counted in a warning.
        batch_size: inputs run at once. Default: 1,024 rows of features, 2,048 tokens, 32 images.
        collate: makes a batch of a list of the dataset's items.
        max_units: at most so many rows, sequences or images of `data`.
        kinds: rows of `SMOOTH_KINDS`: which gates become ReLU.
        outputs: names of the model's outputs that count; by default those that its task reads (logits, boxes,
            embeddings), and not what is beside them, hidden states or a head of your own: a warning says which maps
            behind gates kept their weights for that. The first is the one that the networks are compared on. A
            tensor without a name counts as class scores: values (a regression) need one, as in {"values": output}.
        max_kl: mean KL to the original, in nats, beyond which there is a warning; of outputs that are no class scores,
            relative error. None for no bound.
        strict: refuse beyond `max_kl`, and where nothing could be measured.
        keep: names of gates that stay smooth, or how many: those that cost the most when each alone is exchanged
            (`hf_lgelu.gate_costs`). Most configs have one key for all gates and cannot say that: the saved one then
            names the kept gates, `hf_lgelu.from_pretrained` rebuilds them, and without this package it is refused.
        target: what the gates become, a row of `hf_lgelu.refit.target_gates.TARGETS`: "relu", "relu6", "leaky_relu",
            "hardswish" or "relu2"; "leaky_relu:0.1" has another slope than 0.01. No config can say a slope: it is saved
            as kept gates are. Of all but ReLU, kinks and slopes are not fitted per channel, and blocks not widened.
        effort: how hard it tries, each rung after the ones before and kept only where held-out inputs are nearer for
            it: "refit", the maps behind the gates (the default); "place", before that each ReLU's kink and slope, about
            as quick again; "distill", then all blocks by Adam on the whole network's outputs, kept where it is nearer
            by more than two standard errors.
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
        checkpoint_dir: a folder for the layers and rungs that are done. A conversion that was killed, called again with
            the same model, data and arguments, goes on from there, to the same result; a "distill" that was broken off
            begins anew. The folder of another one, or of more or fewer processes, is refused. All processes must see
            it. Delete it when the model is saved. `effort`, `tolerance`, `metric`, the steps and the bounds may differ.
        allow_unrefitted: where a map behind a gate cannot be refitted (shared or tied weights, no linear map), exchange
            the gate all the same and say so in the report.
        rewrite_config: rewrite the config keys that the family uses, so that transformers loads the saved model.
        progress: show a progress bar.

    Raises:
        ValueError: nothing to convert, inputs that do not go together or are fewer than 16 distinct rows, sequences of
            different lengths of a model that gives something else where they are padded, no output of a name in
            `outputs`, or a model that torch.export cannot trace.
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
    dials = Dials(
        target=target, effort=effort, width_budget=width_budget, tolerance=tolerance, max_seconds=max_seconds,
        max_kl=max_kl, distill_steps=distill_steps, bf16=bf16,
    )  # fmt: skip
    _require_convertible(model, kinds, dials)
    keep = check_keep(keep, [site.name for site in find_sites(model, kinds)])
    state = known_processes()
    batches = read_batches(data, batch_size=batch_size, data_collator=collate, max_samples=max_units)
    batches = for_decoder(model, batches)
    with looked_at(model):
        folds = deal_folds(batches, batch_size=batch_size, state=state, model=model, outputs=outputs)
        compared, unread = _require_comparable(model, folds.first.load(), "data", outputs)  # before the work
        second = None
        if evaluation_data is not None:
            second = SecondSet(model, evaluation_data, folds, state, batch_size=batch_size, data_collator=collate)
            unread += _require_comparable(model, second.first, "evaluation_data", outputs)[1]
        exchange = plan_exchange(
            model, folds, dials, kinds=kinds, keep=keep, outputs=outputs, rewrite_config=rewrite_config
        )
        mark = None if checkpoint_dir is None else Mark.of(
            model, folds, outputs, gates=(exchange.kinds, exchange.keep, exchange.target), width_budget=width_budget,
            allow_unrefitted=allow_unrefitted,
        )  # fmt: skip
        with work_in(checkpoint_dir, mark) as work:
            attempts = Attempts(
                model, folds, exchange, dials, outputs=outputs, allow_unrefitted=allow_unrefitted,
                progress=progress and state.is_main_process, work=work,
            )  # fmt: skip
            best, steps = attempts.climb(None if metric is None else Metric(metric, model))
        beside = () if outputs else uncounted_warnings(model, exchange.sites(model), folds.first.load(), best.layers)
        unread = (*unread, *beside)
        evaluation = None
        if second is not None:
            evaluation = evaluate_conversion(model, best.model, exchange.direct_swap(model), second, outputs)
        report = ConversionReport(
            model=type(model).__name__,
            gates={site.name: type(site.module).__name__ for site in exchange.sites(model)},
            kept={name: type(model.get_submodule(name)).__name__ for name in exchange.keep},
            layers=best.layers,
            held_out=best.held_out,
            evaluation=evaluation,
            repeated=0 if second is None else second.repeated(),
            units=folds.samples.given,
            distinct_units=len(folds.samples.keys),
            rows=folds.rows,
            folds=len(folds.folds),
            seconds=time.perf_counter() - started,
            outputs=compared,
            config_changes=best.config_changes,
            smooth_calls=tuple(map(str, find_smooth_calls(best.model, folds.first.load()[:TRIED].inputs))),
            steps=steps,
            width_share=best.width_share,
            target=exchange.target.title,
            # What was restored took no time that says anything.
            next_step=None if work.is_taken_up else next_rung(steps, attempts.rungs),
        )
    of_config = config_warnings(model, best.config_changes, rewrite_config)
    warnings = (*unread, *conversion_warnings(report, max_kl), *of_config)
    report = replace(report, warnings=warnings)
    require_good(report, best.model, dials, strict=strict)
    return Conversion(best.model, report)


def _require_convertible(model: nn.Module, kinds: Sequence[str], dials: Dials) -> None:
    """Raise what `convert_to_relu` says it raises of these."""
    reason = why_not_writable(model)
    if reason is not None:
        raise ConversionRefusedError(f"{type(model).__name__} cannot be refitted: {reason}")
    TemporaryRelu(model, kinds=kinds)  # raises where there is no gate
    if dials.highest == "distill" and not can_be_distilled(model):
        raise ValueError(
            "effort='distill' takes steps of Adam, and in float16 they are not finite: convert model.float() "
            "(the result may be cast back), or stop at effort='place'"
        )


def _require_comparable(
    model: nn.Module, batch: Batch, what: str, outputs: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the outputs that count, and a warning of labels that do not fit the first of them.

    Raises ValueError unless the model takes a batch of the data, `what`, and gives some.
    """
    (first,) = taken_by(model, [batch], what)
    few = first[:TRIED]
    tensors = compared_outputs(model, few.inputs, outputs).tensors
    scores, labels = next(iter(tensors.values())), few.labels
    if labels is None or labels.is_floating_point() or labels_fit(labels, scores):
        return tuple(tensors), ()
    unread = (
        f"the labels of {what}, of shape {tuple(labels.shape)}, are not one for each row of the scores, of shape "
        f"{tuple(scores.shape)} with the classes last: no accuracy or perplexity was measured by them"
    )
    return tuple(tensors), (unread,)
