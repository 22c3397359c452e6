"""Weights that a norm or another parametrization computes: plain in a copy, and computed again where that is possible.

`torch.nn.utils` computes a weight by a hook (weight_norm, spectral_norm) or by a parametrization.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm, weight_norm

from hf_lgelu.models.copies import independent_copy

_ROUNDING = 8  # units in the last place


@dataclass(frozen=True)
class ComputedWeight:
    """A weight that was computed: the names of its module and tensor, and how to compute it again, if that is known."""

    module: str
    tensor: str
    put: Callable[[nn.Module], Any] | None
    remove: Callable[[nn.Module], Any]


def with_plain_weights(model: nn.Module) -> tuple[nn.Module, list[ComputedWeight]]:
    """(a copy in eval mode with plain weights in the place of computed ones, these weights); `model` if it has none."""
    if not any(True for module in model.modules() for _ in _computed_in(module)):
        return model, []
    plain, found = independent_copy(model).eval(), list[ComputedWeight]()
    for name, module in [*plain.named_modules()]:
        if parametrize.is_parametrized(module):  # a copy has the class of the original, and the removal changes it
            kind = type(module)
            own = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
            module.__class__ = type(kind.__name__, kind.__bases__, own)
        for tensor, put, remove in [*_computed_in(module)]:
            remove(module)
            found.append(ComputedWeight(name, tensor, put, remove))
    return plain, found


@torch.no_grad()
def compute_again(model: nn.Module, weights: list[ComputedWeight]) -> tuple[str, ...]:
    """A sentence on the weights that stay plain, for a report. Changes `model` in place.

    A norm comes back where it gives the present weight: a weight norm always, a spectral norm where nothing changed.
    """
    plain = []
    for each in weights:
        module = model.get_submodule(each.module)
        if not hasattr(module, each.tensor):  # another gate stands there now
            continue
        wanted: Tensor = getattr(module, each.tensor).detach().clone()
        if each.put is not None:
            each.put(module)
            change, most = getattr(module, each.tensor) - wanted, wanted.abs().max() * torch.finfo(wanted.dtype).eps
            is_computed = each.tensor not in dict(module.named_parameters(recurse=False))
            if is_computed and bool((change.abs() <= _ROUNDING * most).all()):
                continue
            each.remove(module)
            getattr(module, each.tensor).copy_(wanted)
        plain.append(f"{each.module}.{each.tensor}".removeprefix("."))
    if not plain:
        return ()
    return (
        f"{', '.join(plain)}: the norm or parametrization that computed {'it' if len(plain) == 1 else 'them'} is "
        "removed, because it cannot give the refitted weights (a spectral norm bounds them). To load the result into "
        "your own class, build these layers without it",
    )


_Way = tuple[str, Callable[[nn.Module], Any] | None, Callable[[nn.Module], Any]]


def _computed_in(module: nn.Module) -> Iterator[_Way]:
    """(name, function that computes it again, function that makes it plain) of each computed weight of a module."""
    for tensor, steps in getattr(module, "parametrizations", {}).items() if parametrize.is_parametrized(module) else ():
        yield tensor, partial(_parametrize, tensor, [*steps]), partial(_plain, tensor)
    names = {name for name, _ in module.named_parameters(recurse=False)}
    for name in sorted(names):
        tensor, _, part = name.rpartition("_")
        if not torch.is_tensor(getattr(module, tensor, None)):  # named so by chance
            continue
        if part == "g" and f"{tensor}_v" in names:
            size, whole = getattr(module, name).shape, getattr(module, f"{tensor}_v").shape
            kept = [axis for axis, (one, other) in enumerate(zip(size, whole, strict=False)) if one == other]
            dim = max(kept, key=lambda axis: size[axis]) if kept else None  # a single number: of the whole weight
            yield tensor, partial(_norm_by_hook, tensor, dim), partial(remove_weight_norm, name=tensor)
        elif part == "orig" and hasattr(module, f"{tensor}_u"):
            yield tensor, None, partial(remove_spectral_norm, name=tensor)


def _parametrize(tensor: str, steps: list[nn.Module], module: nn.Module) -> None:
    with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # no right inverse
        for step in steps:
            parametrize.register_parametrization(module, tensor, step)


def _plain(tensor: str, module: nn.Module) -> None:
    if parametrize.is_parametrized(module, tensor):
        parametrize.remove_parametrizations(module, tensor, leave_parametrized=True)


def _norm_by_hook(tensor: str, dim: int | None, module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends the parametrization
        weight_norm(module, tensor, dim)
