"""The whole converted network moved towards the original's outputs: the last step, and the only one with all layers.

No labels: the loss is the KL to the original, of outputs that are no class scores the squared error of each column over
its variance. How large the steps may be differs by orders of magnitude between networks, so a few are tried. What is
kept is the best state seen on inputs that no step saw, the first one among them.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from hf_lgelu.models.example_run import call_by_name, run_example
from hf_lgelu.models.task_outputs import task_outputs
from hf_lgelu.refit.batches import Batch
from hf_lgelu.refit.centred import CentredAdam, CentredMap
from hf_lgelu.refit.compare import classes_last, compared_outputs, in_order_of
from hf_lgelu.refit.folds import Folds

STEPS = 200
_RATES = (0.003, 0.02)  # of a parameter's mean absolute value, at the most; falls to zero as a cosine
_TRIAL = 16  # steps after which one of them is taken
_FAR_FROM_DONE, _LONGER = 0.9, 3  # where the trial leaves less than this share of the loss, so many times the steps
_WARMUP = 10
_LOOKS = 8  # how often the held-out inputs are looked at
_NO_SPREAD = 1e-12  # of a column's square: rounding, not information
_MOST_WATCHED = 16  # batches of them


def distill(
    original: nn.Module,
    converted: nn.Module,
    folds: Folds,
    outputs: Sequence[str] | None = None,
    *,
    names: Sequence[str],
    steps: int = STEPS,
    max_seconds: float | None = None,
) -> tuple[float, float]:
    """Adam on some parameters of `converted`. Changes `model` in place: `converted`, where that brings it nearer.

    The same inputs give the same steps, unless the time runs out.

    Args:
        original: what the outputs should be.
        converted: the network that is moved, in eval mode throughout.
        folds: the data; every fold is fitted on, the held-out part is only looked at.
        outputs: names of those that count; the first is the one that is brought nearer.
        names: the parameters that are moved.
        steps: of one batch each; three times as many where the first few take a tenth of the loss away.
        max_seconds: stop earlier.

    Returns:
        (mean loss on the held-out part before, the least one seen).
    """
    started = time.perf_counter()
    parameters = [converted.get_parameter(name) for name in names]
    wanted = {id(parameter): parameter.requires_grad for parameter in converted.parameters()}
    for parameter in converted.parameters():
        parameter.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    # Nothing is traced here: each batch is padded to its own longest.
    batches = [replace(batch, lengths=batch.units.longest(batch.numbers)) for fold in folds.folds for batch in fold]
    watched = [batch.load() for batch in folds.held_out[:_MOST_WATCHED]]

    def look() -> float:
        with torch.no_grad():
            losses = [output_loss(original, converted, batch, outputs) * len(batch) for batch in watched]
        return float(sum(losses)) / sum(map(len, watched))

    first = look()
    start = [parameter.detach().clone() for parameter in parameters]
    centred = centred_maps(converted, set(names), batches[0].load())

    def move(rate: float, steps: int, looks: int) -> tuple[float, list[Tensor]]:
        """(the least loss seen from the start on, the parameters there)."""
        least, best = first, start
        _put(parameters, start)
        order: list[int] = []
        generator = torch.Generator().manual_seed(0)
        sizes = [max(parameter.detach().abs().mean().item(), 1e-3) for parameter in parameters]
        groups = [{"params": [one], "lr": rate * size} for one, size in zip(parameters, sizes, strict=True)]
        optimizer = CentredAdam(groups, centred)
        for step in range(steps):
            share = 0.0 if max_seconds is None else (time.perf_counter() - started) / max_seconds
            if share >= 1:
                break
            progress = max(step / steps, share)
            order = order or torch.randperm(len(batches), generator=generator).tolist()
            with torch.enable_grad():
                loss = output_loss(original, converted, batches[order.pop()].load(), outputs)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step(min(1.0, (step + 1) / _WARMUP) * 0.5 * (1 + math.cos(math.pi * progress)))
            if (step + 1) % max(1, steps // looks) == 0:
                now = look()
                if now < least:
                    least, best = now, [parameter.detach().clone() for parameter in parameters]
        return least, best

    least, best = first, start
    try:
        tried = {rate: move(rate, min(_TRIAL, steps), 1)[0] for rate in _RATES}
        rate = min(tried, key=tried.__getitem__)
        longer = _LONGER if tried[rate] < _FAR_FROM_DONE * first else 1
        least, best = move(rate, longer * steps, _LOOKS)
    finally:
        _put(parameters, best)
        for parameter in converted.parameters():
            parameter.grad = None
            parameter.requires_grad_(wanted[id(parameter)])
    return first, least


@torch.no_grad()
def _put(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def centred_maps(model: nn.Module, names: Collection[str], batch: Batch) -> list[CentredMap]:
    """The linear layers with a bias that are moved, each centred at the mean of its inputs over a batch."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D) and {f"{name}.weight", f"{name}.bias"} <= set(names)
    }
    means: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(
                lambda _, inputs, name=name: means.update({name: inputs[0].flatten(0, -2).mean(0)})
            )
            hooks.callback(handle.remove)
        run_example(model, batch.inputs)
    return [
        CentredMap(module.weight, module.bias, means[name], type(module) is Conv1D)
        for name, module in modules.items()
        if name in means
    ]


def output_loss(original: nn.Module, converted: nn.Module, batch: Batch, outputs: Sequence[str] | None) -> Tensor:
    """How far the outputs that count are from the original's over what is no padding, added up, a scalar.

    Of class scores that come first it is the mean KL(original ‖ converted), of all others the mean over columns of
    Σ(ŷ − y)² / Σ(y − ȳ)².
    """
    reference = compared_outputs(original, batch.inputs, outputs)
    given = in_order_of(reference, reference._replace(tensors=_called(converted, batch.inputs, outputs)))
    mask = batch.tensors.get("attention_mask")
    total = torch.zeros((), device=next(converted.parameters()).device)
    for number, (name, expected) in enumerate(reference.tensors.items()):
        pair = (expected, given.tensors[name])
        if mask is not None and mask.shape == expected.shape[:-1]:
            pair = tuple(value[mask.bool().to(expected.device)] for value in pair)
        wanted, found = (value.reshape(-1, value.shape[-1]).float() for value in pair)
        if number == 0 and reference.are_logits:
            total = total + F.kl_div(
                found.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True
            )
        else:
            spread = (wanted - wanted.mean(0)).square().sum(0)
            error = (found - wanted).square().sum(0)
            varies = spread > _NO_SPREAD * wanted.square().sum(0)
            total = total + (error[varies] / spread[varies]).sum() / max(int(varies.sum()), 1)
    return total


def _called(model: nn.Module, inputs: Any, outputs: Sequence[str] | None) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    place: Callable[[Any], Any] = lambda value: value.to(device) if isinstance(value, Tensor) else value  # noqa: E731
    if isinstance(inputs, Tensor):
        found = task_outputs(model(place(inputs)), outputs)
    else:
        found = task_outputs(call_by_name(model, {name: place(value) for name, value in inputs.items()}), outputs)
    return {name: classes_last(value) for name, value in found.items() if value.ndim}
