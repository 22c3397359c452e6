"""The whole converted network moved towards the original's outputs: the last step, and the only one with all layers.

No labels: the loss is the KL to the original, of outputs that are no class scores the relative squared error. What is
kept is the best state seen on inputs that no step saw, the first one among them.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
from hf_lgelu.refit.compare import compared_outputs
from hf_lgelu.refit.folds import Folds

STEPS = 200
_RATE = 0.003  # of a parameter's mean absolute value, at the most; falls to zero as a cosine
_WARMUP = 10
_LOOKS = 8  # how often the held-out inputs are looked at
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
        steps: of one batch each.
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
    order: list[int] = []
    generator = torch.Generator().manual_seed(0)
    watched = [batch.load() for batch in folds.held_out[:_MOST_WATCHED]]

    def look() -> float:
        with torch.no_grad():
            losses = [output_loss(original, converted, batch, outputs) * len(batch) for batch in watched]
        return float(sum(losses)) / sum(map(len, watched))

    first = least = look()
    best = [parameter.detach().clone() for parameter in parameters]
    optimizer = CentredAdam(
        [
            {"params": [parameter], "lr": _RATE * max(parameter.detach().abs().mean().item(), 1e-3)}
            for parameter in parameters
        ],
        centred_maps(converted, set(names), batches[0].load()),
    )
    try:
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
            if (step + 1) % max(1, steps // _LOOKS) == 0:
                now = look()
                if now < least:
                    least = now
                    best = [parameter.detach().clone() for parameter in parameters]
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, best, strict=True):
                parameter.copy_(value)
                parameter.grad = None
        for parameter in converted.parameters():
            parameter.requires_grad_(wanted[id(parameter)])
    return first, least


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
    """Mean KL(original ‖ converted) over the predictions that are no padding, or ‖ŷ − y‖² / ‖y‖², a scalar."""
    reference = compared_outputs(original, batch.inputs, outputs)
    name, expected = next(iter(reference.tensors.items()))
    given = _called(converted, batch.inputs, outputs)[name]
    given = given[:, None] if given.ndim == 1 else given.movedim(1, -1) if given.ndim > 3 else given
    mask = batch.tensors.get("attention_mask")
    if mask is not None and mask.shape == expected.shape[:-1]:
        rows = mask.bool().to(expected.device)
        expected, given = expected[rows], given[rows]
    expected, given = (value.reshape(-1, value.shape[-1]).float() for value in (expected, given))
    if not reference.are_logits:
        return (given - expected).square().sum() / expected.square().sum().clamp(min=1e-30)
    return F.kl_div(given.log_softmax(-1), expected.log_softmax(-1), reduction="batchmean", log_target=True)


def _called(model: nn.Module, inputs: Any, outputs: Sequence[str] | None) -> Mapping[str, Tensor]:
    device = next(model.parameters()).device
    place: Callable[[Any], Any] = lambda value: value.to(device) if isinstance(value, Tensor) else value  # noqa: E731
    if isinstance(inputs, Tensor):
        return task_outputs(model(place(inputs)), outputs)
    return task_outputs(call_by_name(model, {name: place(value) for name, value in inputs.items()}), outputs)
