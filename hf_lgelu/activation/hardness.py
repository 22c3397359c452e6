"""The hardness λ: its reparameterization, its target and the names of its initial profiles.

Notation follows the paper (arXiv:2603.21991): λ ≥ 1 is the hardness, s the raw hardness that an
optimizer moves, t the temperature, and λ(s) = 1 + softplus(s / t).
"""

import math
from collections.abc import Collection
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_lgelu.activation.gates import DEFAULT_GATE, check_gate

DEFAULT_TEMPERATURE = 0.1  # the paper's t

DEFAULT_INIT_HARDNESS = 1.05
"""λ₀ of a new activation. σ(s/t) = 1 − e^(−(λ−1)) makes the gradient of s small near λ = 1, so a λ₀ closer to 1 (the
paper-like 1.0067) takes many more steps to leave GELU."""

DEFAULT_TOLERANCE = 5e-3  # the paper's ε, the L¹ distance between the gate G(λx) and the Heaviside step

# s, t and λ are float32 tensors; with a larger λ, or a t below 1e-37, s/t would overflow or be 0/0.
LARGEST_HARDNESS = 1e37


def check_temperature(temperature: float) -> float:
    """`temperature` as a float. Raises ValueError if it is not above 0, or if float32 cannot hold it."""
    value = float(temperature)
    if not 1 / LARGEST_HARDNESS <= value <= LARGEST_HARDNESS:
        raise ValueError(
            f"temperature must be a finite number > 0 within float32's range, got {temperature!r} (the paper uses 0.1)"
        )
    return value


def check_init_hardness(hardness: float) -> float:
    """`hardness` as a float. Raises ValueError if no finite raw hardness stands for it."""
    value = float(hardness)
    if not 1 < value <= LARGEST_HARDNESS:
        raise ValueError(
            f"a learnable hardness λ must be a finite number > 1 within float32's range, got {hardness!r}: "
            "λ(s) = 1 + softplus(s/t) reaches exactly 1 only at s = -inf, where it has no gradient. "
            "Use a value just above, e.g. 1.0067 or 1.05"
        )
    return value


def hardness_from_raw(raw_hardness: Tensor, temperature: Tensor | float) -> Tensor:
    """λ(s) = 1 + softplus(s / t), elementwise; differentiable in both."""
    # The default threshold of 20 switches to the identity where the difference is still 2e-9 in float64.
    return 1 + F.softplus(raw_hardness / temperature, threshold=40)


def effective_hardness(raw_hardness: Tensor, temperature: Tensor | float, override: Tensor) -> Tensor:
    """The override where it is 1 or more, else λ(s); elementwise.

    0 stands for no override, and so do values between 0 and 1. An average of buffers over training steps (timm's and
    torch's EMA of a model) passes these values on its way up from 0, and no λ is below 1.
    """
    # torch.where keeps s in the graph with a gradient of exactly 0 while the override rules, which DDP's
    # reducer needs; a branch in Python would break compiled graphs.
    return torch.where(override >= 1, override, hardness_from_raw(raw_hardness, temperature))


def hardness_rate(raw_hardness: Tensor, temperature: Tensor | float, override: Tensor) -> Tensor:
    """∂λ/∂s of `effective_hardness`: σ(s/t)/t, or 0 where the override rules; elementwise."""
    rate = torch.sigmoid(raw_hardness / temperature) / temperature
    return torch.where(override >= 1, torch.zeros_like(rate), rate)


def raw_from_hardness(hardness: float, temperature: float = DEFAULT_TEMPERATURE) -> float:
    """The s with λ(s) = `hardness`: s = t·log(e^(λ−1) − 1), accurate from λ = 1 + 1e-15 to 1e37.

    Raises ValueError if `hardness` ≤ 1, `temperature` ≤ 0 or float32 cannot hold either.
    """
    excess = check_init_hardness(hardness) - 1
    temperature = check_temperature(temperature)
    # log(expm1(y)) overflows from y = 710 on; y + log1p(-exp(-y)) loses every digit below y = 1e-16.
    log_expm1 = math.log(math.expm1(excess)) if excess < 1 else excess + math.log1p(-math.exp(-excess))
    return temperature * log_expm1


def hardness_for_tolerance(tolerance: float = DEFAULT_TOLERANCE, gate: str = DEFAULT_GATE) -> float:
    """The λ at which the gate is within `tolerance` of a step, in L¹.

    The paper's E∞(λ) = ∫|H(x) − G(λx)|dx = w/λ, solved for λ, with w the gate's width. For λ-GELU w is 2/√(2π), which
    gives 159.577 for ε = 5e-3; for λ-SiLU w is 2·ln 2, which gives 277.259.

    Args:
        tolerance: ε, in (0, w], the range in which λ ≥ 1.
        gate: a row of GATES.

    Raises:
        ValueError: `tolerance` is out of its range, or there is no such gate.

    >>> from hf_lgelu.activation.hardness import hardness_for_tolerance
    >>> round(hardness_for_tolerance(5e-3), 3)
    159.577
    >>> round(hardness_for_tolerance(5e-3, gate="lambda_silu"), 3)
    277.259
    """
    value = float(tolerance)
    largest = check_gate(gate).width
    if not (0 < value <= largest and largest / value <= LARGEST_HARDNESS):
        raise ValueError(
            f"tolerance must lie in (0, {largest:.4f}] so that the target hardness is finite and at least 1, "
            f"got {tolerance!r} (the paper uses 5e-3)"
        )
    return largest / value


def swap_error_bound(hardness: float, gate: str = DEFAULT_GATE) -> float:
    """κ/λ, the largest |x·G(λx) − ReLU(x)| over all x, with κ = max u(1 − G(u)): 0.16997 for λ-GELU.

    Raises ValueError for a λ below 1 or NaN, and for a gate that is no row of GATES.

    >>> from hf_lgelu.activation.hardness import swap_error_bound
    >>> f"{swap_error_bound(159.577):.5f}"
    '0.00107'
    """
    value = float(hardness)
    if not value >= 1:
        raise ValueError(f"hardness must be at least 1, got {hardness!r}")
    return check_gate(gate).swap_error / value


INIT_MODES = ("uniform", "increasing", "decreasing")
"""The profiles of initial hardness over depth: every λ = init_hardness, or linear to or from high_hardness."""


def require_known(what: str, name: Any, known: Collection[str]) -> None:
    """Raise ValueError with the `known` names, unless `name` is one of them."""
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; accepted: {', '.join(known)}")


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a real number, of Python or numpy, but no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)
