"""Hardening as functions of the model: the callback calls them, and so can any training loop."""

import torch
from torch import Tensor, nn

from hf_lgelu.activation.hardness import LARGEST_HARDNESS, hardness_for_tolerance, hardness_from_raw
from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.models.profile import smallest_hardness, whole_tensor
from hf_lgelu.models.sites import raw_parameters, require_lambda_gelu
from hf_lgelu.training.schedules import scheduled_hardness

HARDENED_FRACTION = 0.5
"""A model counts as hardened from this share of the target on: over 18 reference runs of the MLPs no
best epoch that substituted without loss had a smaller λ."""


@torch.no_grad()
def anneal_hardness(
    model: nn.Module, progress: float, *, target_hardness: float | None = None, schedule: str = "linear"
) -> None:
    """Set every λ to its place on the way from λ(s) to the target; s itself keeps its value.

    Changes `model` in place. λ(e) follows from s, `progress` and the schedule alone, so a resumed run needs
    nothing else. From the first call on λ no longer follows s, whose gradient is exactly 0: call
    `freeze_hardness` before each optimizer step.

    Args:
        model: has λ-GELU sites; unwrapped.
        progress: (e − e_s)/(T − e_s) ∈ [0, 1], see `hardening_progress`.
        target_hardness: λ at progress 1; default `hardness_for_tolerance()`, 159.577.
        schedule: a row of SCHEDULES.

    Raises ValueError if the model has no λ-GELU or an argument is out of range; then no λ has moved.
    """
    target = check_target_hardness(target_hardness)
    by_device: dict[torch.device, list[LambdaGELU]] = {}
    for _, module in require_lambda_gelu(model):
        by_device.setdefault(module.hardness_override.device, []).append(module)
    for neighbours in by_device.values():
        raw = [whole_tensor(module.raw_hardness).flatten() for module in neighbours]
        sizes = [s.numel() for s in raw]
        temperatures = [whole_tensor(module.temperature).expand(n) for module, n in zip(neighbours, sizes, strict=True)]
        start = hardness_from_raw(torch.cat(raw).double(), torch.cat(temperatures).double())
        annealed = scheduled_hardness(schedule, start, target, progress).split(sizes)
        overrides = [module.hardness_override for module in neighbours]
        _write(overrides, [new.view(old.shape) for new, old in zip(annealed, overrides, strict=True)])


def _write(buffers: list[Tensor], values: list[Tensor]) -> None:
    """Copy whole values into buffers, in one operation but for those that tensor parallelism has distributed."""
    plain = [not hasattr(buffer, "full_tensor") for buffer in buffers]
    torch._foreach_copy_(
        [buffer for buffer, is_plain in zip(buffers, plain, strict=True) if is_plain],
        [value for value, is_plain in zip(values, plain, strict=True) if is_plain],
    )
    for buffer, value, is_plain in zip(buffers, values, plain, strict=True):
        if not is_plain:
            from torch.distributed.tensor import distribute_tensor

            value = value.to(buffer.dtype)
            buffer.copy_(distribute_tensor(value, buffer.device_mesh, buffer.placements, src_data_rank=None))


def freeze_hardness(model: nn.Module) -> None:
    """Keep the optimizer off every s: call it between backward and the optimizer step.

    Changes `model` in place (the gradients of s). A gradient of exactly 0 is not enough, since momentum would go
    on moving s; without a gradient an optimizer skips a parameter. `requires_grad` stays True, because DDP's
    reducer waits for s.
    Raises ValueError for a model without λ-GELU.
    """
    for _, module in require_lambda_gelu(model):
        for parameter in raw_parameters(module):
            parameter.grad = None


@torch.no_grad()
def release_hardness(model: nn.Module) -> None:
    """Let λ follow s again. Changes `model` in place. Raises ValueError for a model without λ-GELU."""
    for _, module in require_lambda_gelu(model):
        module.hardness_override.zero_()


def is_hardened(model: nn.Module, target_hardness: float | None = None, *, fraction: float = HARDENED_FRACTION) -> bool:
    """Whether every λ has reached `fraction` of the target.

    Half the target is enough for a substitution that costs next to nothing; `fraction=1` asks for all of it.

    Args:
        model: has λ-GELU sites.
        target_hardness: default `hardness_for_tolerance()`, 159.577.
        fraction: in (0, 1].

    Raises ValueError for a model without λ-GELU, a target that is not a finite number above 1 or a fraction
    outside (0, 1].
    """
    target = check_target_hardness(target_hardness)
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(f"fraction must be a number in (0, 1], got {fraction!r}")
    return smallest_hardness(model) >= fraction * target


def resolve_target_hardness(target_hardness: float | None, tolerance: float | None) -> float:
    """The target that the two options stand for; raise if both are given or one is out of range."""
    if target_hardness is not None and tolerance is not None:
        raise ValueError(
            f"give target_hardness or tolerance, not both (got {target_hardness} and {tolerance}): "
            "the tolerance ε stands for the target 2/(ε√(2π))"
        )
    return check_target_hardness(target_hardness if tolerance is None else hardness_for_tolerance(tolerance))


def check_target_hardness(target_hardness: float | None) -> float:
    """Return the target, `hardness_for_tolerance()` for None; raise if it is not a finite number above 1."""
    if target_hardness is None:
        return hardness_for_tolerance()
    is_number = isinstance(target_hardness, int | float) and not isinstance(target_hardness, bool)
    if not is_number or not 1 < target_hardness <= LARGEST_HARDNESS:
        raise ValueError(
            f"target_hardness must be a finite number > 1 within float32's range, got {target_hardness!r}; "
            "hardness_for_tolerance(tolerance) gives it"
        )
    return float(target_hardness)
