"""The λ-gates for torch.compile: traceable operations with derivatives by hand, which share one exponential.

Autograd through `eager` would give the compiler erf, whose code takes an exponential of its own, and
the masks of two clamps; this form makes the compiled λ-GELU as fast as the compiled GELU.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.kernels.eager import internal_dtype

_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_TANH_SLOPE = math.sqrt(2.0 / math.pi)
_TANH_CUBE = 0.044715

# erfc(v)·e^(v²) ≈ Σ a_i t^i with t = 1/(1 + p·v), v ≥ 0, to 1.5e-7: Abramowitz and Stegun 7.1.26, as in torch's
# vectorized erf. Here a_i/2, for Φ, and p/√2, for u.
_P = 0.3275911 / math.sqrt(2.0)
_HALF_A = tuple(a / 2 for a in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))

_LARGEST_EXPONENT = 64.0
"""From this z on, e^(−z) < 1.7e-28 counts as 0: were it a subnormal, or its product with a small δ, every operation on
it would be many times slower."""


def _exponential(z: Tensor) -> Tensor:
    """e^(−z), exactly 0 where it no longer matters, also where z is infinite; NaN stays."""
    return torch.exp(-torch.where(z >= _LARGEST_EXPONENT, math.inf, z))


def _gaussian(u: Tensor) -> tuple[Tensor, Tensor]:
    exponential = _exponential(0.5 * u * u)
    t = 1.0 / (1.0 + _P * u.abs())
    polynomial = _HALF_A[4]
    for coefficient in reversed(_HALF_A[:4]):
        polynomial = coefficient + t * polynomial
    tail = t * polynomial * exponential
    return torch.where(u > 0, 1.0 - tail, tail), exponential * _INV_SQRT_2PI


def _logistic(u: Tensor) -> tuple[Tensor, Tensor]:
    exponential = _exponential(u.abs())
    t = 1.0 / (1.0 + exponential)
    return torch.where(u > 0, t, exponential * t), exponential * t * t


def _tanh(u: Tensor) -> tuple[Tensor, Tensor]:
    bounded = u.clamp(-16.0, 16.0)  # where both are constant already: u³ could overflow
    square = bounded * bounded
    step, density = _logistic(2.0 * _TANH_SLOPE * bounded * (1.0 + _TANH_CUBE * square))
    return step, density * (2.0 * _TANH_SLOPE * (1.0 + 3.0 * _TANH_CUBE * square))


_STEPS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "lambda_gelu": _gaussian,
    "lambda_gelu_tanh": _tanh,
    "lambda_silu": _logistic,
}
"""u → (G(u), g(u)), to float32's accuracy."""


class _LambdaGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hardness: Tensor, gate: str) -> Tensor:
        ctx.save_for_backward(x, hardness)
        ctx.gate = gate
        wide = x.to(torch.float32)
        step, _ = _STEPS[gate](wide * hardness.to(torch.float32))
        return (wide * step).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, Tensor, None]:
        x, hardness = ctx.saved_tensors
        wide, wide_delta, slope = x.to(torch.float32), delta.to(torch.float32), hardness.to(torch.float32)
        step, density = _STEPS[ctx.gate](wide * slope)
        # x·g(λx) first: at infinity it is ∞·0, so that the gradient is NaN as the plain activation's is.
        scaled = wide * density
        grad_x = wide_delta * (step + slope * scaled)
        # The compiler leaves this out where λ needs no gradient.
        grad_hardness = (wide_delta * scaled * wide).sum_to_size(hardness.shape)
        return grad_x.to(x.dtype), grad_hardness.to(hardness.dtype), None


def lambda_gate(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> Tensor:
    """x·G(λx); saves x and λ. First derivatives only, as in everything that torch.compile makes."""
    return _LambdaGate.apply(x, hardness, gate)


def refusal(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> str | None:
    """Why this form is not the one for this input and this moment, or None."""
    if gate not in _STEPS:
        return f"it has no formula for {gate}"
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return "it is for torch.compile alone (exported graphs take 'eager')"
    if torch._C._are_functorch_transforms_active():
        return "torch.func needs operations that it can transform"
    if internal_dtype(x) == torch.float64:
        return "its steps are accurate to float32"
    return None
