"""Hardening as functions of the model: the callback calls them, and so can any training loop."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_lgelu.activation.gates import DEFAULT_GATE, GATES
from hf_lgelu.activation.hardness import DEFAULT_TOLERANCE, hardness_for_tolerance, hardness_from_raw
from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.profile import whole_tensor
from hf_lgelu.models.sites import require_lambda_gelu
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
        target_hardness: λ at progress 1; by default each gate's `hardness_for_tolerance()`, 159.577 for λ-GELU.
        schedule: a row of SCHEDULES.

    Raises ValueError if the model has no λ-GELU or an argument is out of range; then no λ has moved.
    """
    targets = target_hardnesses(target_hardness)
    anneal_modules([module for _, module in require_lambda_gelu(model)], progress, targets, schedule)


@torch.no_grad()
def anneal_modules(
    modules: Sequence[LambdaGate], progress: float, targets: Mapping[str, float], schedule: str
) -> None:
    """`anneal_hardness` of modules that were found before: a few operations for all that share a device.

    `targets` maps rows of GATES to λ at progress 1.
    """
    by_device: dict[torch.device, list[LambdaGate]] = {}
    for module in modules:
        by_device.setdefault(module.hardness_override.device, []).append(module)
    for neighbours in by_device.values():
        raw = [whole_tensor(module.raw_hardness).flatten() for module in neighbours]
        sizes = [s.numel() for s in raw]
        temperature = torch.cat([m.temperature.expand(size) for m, size in zip(neighbours, sizes, strict=True)])
        start = hardness_from_raw(torch.cat(raw).double(), temperature.double())
        ends = [start.new_full((size,), targets[m.gate]) for m, size in zip(neighbours, sizes, strict=True)]
        annealed = scheduled_hardness(schedule, start, torch.cat(ends), progress).split(sizes)
        overrides = [module.hardness_override for module in neighbours]
        torch._foreach_copy_(overrides, [new.view_as(old) for new, old in zip(annealed, overrides, strict=True)])


def freeze_hardness(model: nn.Module) -> None:
    """Keep the optimizer off every s: call it between backward and the optimizer step.

    Changes `model` in place (the gradients of s). A gradient of exactly 0 is not enough, since momentum would go
    on moving s; without a gradient an optimizer skips a parameter. `requires_grad` stays True, because DDP's
    reducer waits for s.
    Raises ValueError for a model without λ-GELU.
    """
    freeze_modules(module for _, module in require_lambda_gelu(model))


def freeze_modules(modules: Iterable[LambdaGate]) -> None:
    """`freeze_hardness` of modules that were found before."""
    for module in modules:
        module.raw_hardness.grad = None


def release_hardness(model: nn.Module) -> None:
    """Let λ follow s again. Changes `model` in place. Raises ValueError for a model without λ-GELU."""
    release_modules(module for _, module in require_lambda_gelu(model))


@torch.no_grad()
def release_modules(modules: Iterable[LambdaGate]) -> None:
    """`release_hardness` of modules that were found before."""
    torch._foreach_zero_([module.hardness_override for module in modules])


def is_hardened(model: nn.Module, target_hardness: float | None = None, *, fraction: float = HARDENED_FRACTION) -> bool:
    """Whether every λ has reached `fraction` of the target.

    Half the target is enough for a substitution that costs next to nothing; `fraction=1` asks for all of it.

    Args:
        model: has λ-GELU sites.
        target_hardness: by default each gate's `hardness_for_tolerance()`, 159.577 for λ-GELU.
        fraction: in (0, 1].

    Raises ValueError for a model without λ-GELU, a target that is not a finite number above 1 or a fraction
    outside (0, 1].
    """
    targets = target_hardnesses(target_hardness)
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(f"fraction must be a number in (0, 1], got {fraction!r}")
    return has_reached(model, targets, fraction)


@torch.no_grad()
def has_reached(model: nn.Module, targets: Mapping[str, float], fraction: float = HARDENED_FRACTION) -> bool:
    """`is_hardened`, with the target of each row of GATES."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, module in require_lambda_gelu(model):
        hardness = whole_tensor(module.hardness)
        wanted = hardness.new_tensor(fraction * targets[module.gate])  # in float32, as λ is
        by_device.setdefault(hardness.device, []).append((hardness >= wanted).all())
    return all(bool(torch.stack(reached).all()) for reached in by_device.values())


def target_hardnesses(target_hardness: float | None = None, tolerance: float | None = None) -> dict[str, float]:
    """{row of GATES: its target}: the one number that is given, or what the tolerance means for each."""
    return {gate: resolve_target_hardness(target_hardness, tolerance, gate) for gate in GATES}


def resolve_target_hardness(
    target_hardness: float | None, tolerance: float | None, gate: str = DEFAULT_GATE
) -> float:
    """The target that the two options stand for; raise if both are given or one is out of range."""
    if target_hardness is not None and tolerance is not None:
        raise ValueError(
            f"give target_hardness or tolerance, not both (got {target_hardness} and {tolerance}): "
            "the tolerance ε stands for a target, 2/(ε√(2π)) for λ-GELU"
        )
    if target_hardness is None:
        return hardness_for_tolerance(DEFAULT_TOLERANCE if tolerance is None else tolerance, gate)
    if not isinstance(target_hardness, int | float) or not 1 < target_hardness < float("inf"):
        raise ValueError(
            f"target_hardness must be a finite number > 1, got {target_hardness!r}; "
            "hardness_for_tolerance(tolerance) gives it"
        )
    return float(target_hardness)
