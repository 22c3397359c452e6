"""Weights that a norm or another parametrization computes: plain in a copy, then computed again where possible."""

import contextlib
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from hf_lgelu.models.copies import independent_copy

_ROUNDING = 8  # units in the last place

ComputedWeight: TypeAlias = tuple[str, str, list[nn.Module]]
"""(name of a module, name of its tensor, the parametrizations that computed the tensor)."""


def with_plain_weights(model: nn.Module) -> tuple[nn.Module, list[ComputedWeight]]:
    """(a copy in eval mode with plain weights in the place of computed ones, these weights); `model` if it has none.

    Raises ValueError for a norm that computes a weight by a hook.
    """
    for name, module in model.named_modules():
        if any(isinstance(hook, WeightNorm | SpectralNorm) for hook in module._forward_pre_hooks.values()):
            raise ValueError(
                f"a hook of torch.nn.utils.weight_norm or spectral_norm computes a weight of {name or 'the model'}. "
                "Use the function of this name in torch.nn.utils.parametrizations, or make the weight plain before the "
                "conversion (torch.nn.utils.remove_weight_norm, remove_spectral_norm)"
            )
    if not any(map(parametrize.is_parametrized, model.modules())):
        return model, []
    plain, found = independent_copy(model).eval(), list[ComputedWeight]()
    for name, module in [*plain.named_modules()]:
        if not parametrize.is_parametrized(module):
            continue
        kind = type(module)  # the copy has the class of the original, and the removal changes the class
        own = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
        module.__class__ = type(kind.__name__, kind.__bases__, own)
        for tensor, steps in [*module.parametrizations.items()]:
            found.append((name, tensor, [*steps]))
            parametrize.remove_parametrizations(module, tensor, leave_parametrized=True)
    return plain, found


@torch.no_grad()
def compute_again(model: nn.Module, weights: list[ComputedWeight]) -> tuple[str, ...]:
    """A sentence on the weights that stay plain, for a report. Changes `model` in place.

    A norm comes back where it gives the present weight: a weight norm always, a spectral norm where nothing changed.
    """
    plain = []
    for name, tensor, steps in weights:
        module = model.get_submodule(name)
        if not hasattr(module, tensor):  # another gate stands there now
            continue
        wanted: Tensor = getattr(module, tensor).detach().clone()
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # no right inverse
            for step in steps:
                parametrize.register_parametrization(module, tensor, step)
        if parametrize.is_parametrized(module, tensor):
            change, most = getattr(module, tensor) - wanted, wanted.abs().max() * torch.finfo(wanted.dtype).eps
            if bool((change.abs() <= _ROUNDING * most).all()):
                continue
            parametrize.remove_parametrizations(module, tensor, leave_parametrized=True)
            getattr(module, tensor).copy_(wanted)
        plain.append(f"{name}.{tensor}".removeprefix("."))
    if not plain:
        return ()
    return (
        f"{', '.join(plain)}: the norm or parametrization that computed {'it' if len(plain) == 1 else 'them'} is "
        "removed, because it cannot give the refitted weights (a spectral norm bounds them). To load the result into "
        "your own class, build these layers without it",
    )
