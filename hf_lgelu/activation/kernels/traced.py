"""λ-GELU for torch.compile: traceable operations with derivatives by hand, which share one exponential.

Autograd through `eager` would give the compiler erf, whose code takes an exponential of its own, and
the masks of two clamps; this form makes the compiled λ-GELU as fast as the compiled GELU.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hf_lgelu.activation.kernels.eager import internal_dtype

_SQRT2 = math.sqrt(2.0)
_INV_SQRT_PI = 1.0 / math.sqrt(math.pi)

# erfc(v)·e^(v²) ≈ Σ a_i t^i with t = 1/(1 + p·v), v ≥ 0, to 1.5e-7: Abramowitz and Stegun 7.1.26, as in torch's
# vectorized erf. Here a_i/2, for Φ.
_P = 0.3275911
_HALF_A = tuple(a / 2 for a in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))

_LARGEST_SQUARE = 64.0
"""From this v² on, e^(−v²) < 1.7e-28 counts as 0: were it a subnormal, or its product with a small δ, every
operation on it would be many times slower."""


def _exponential(v: Tensor) -> Tensor:
    """e^(−v²), exactly 0 where it no longer matters, also where v² is infinite."""
    square = v * v
    return torch.exp(-torch.where(square < _LARGEST_SQUARE, square, math.inf))


def _gaussian_cdf(v: Tensor, exponential: Tensor) -> Tensor:
    """Φ(v·√2), given e^(−v²)."""
    t = 1.0 / (1.0 + _P * v.abs())
    polynomial = _HALF_A[4]
    for coefficient in reversed(_HALF_A[:4]):
        polynomial = coefficient + t * polynomial
    tail = t * polynomial * exponential
    return torch.where(v > 0, 1.0 - tail, tail)


class _LambdaGELUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hardness: Tensor) -> Tensor:
        ctx.save_for_backward(x, hardness)
        wide = x.to(torch.float32)
        v = wide * (hardness.to(torch.float32) / _SQRT2)
        return (wide * _gaussian_cdf(v, _exponential(v))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, Tensor]:
        x, hardness = ctx.saved_tensors
        wide, wide_delta = x.to(torch.float32), delta.to(torch.float32)
        slope = hardness.to(torch.float32) / _SQRT2
        v = wide * slope
        exponential = _exponential(v)
        # x·φ(λx)·√2 first: at infinity it is ∞·0, so that the gradient is NaN as nn.GELU's is.
        scaled = wide * (exponential * _INV_SQRT_PI)
        grad_x = wide_delta * (_gaussian_cdf(v, exponential) + slope * scaled)
        # The compiler leaves this out where λ needs no gradient.
        grad_hardness = (wide_delta * scaled * wide).sum_to_size(hardness.shape) / _SQRT2
        return grad_x.to(x.dtype), grad_hardness.to(hardness.dtype)


def lambda_gelu(x: Tensor, hardness: Tensor) -> Tensor:
    """x·Φ(λx); saves x and λ. First derivatives only, as in everything that torch.compile makes."""
    return _LambdaGELUFunction.apply(x, hardness)


def refusal(x: Tensor, hardness: Tensor) -> str | None:
    """Why this form is not the one for this input and this moment, or None."""
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return "it is for torch.compile alone (exported graphs take 'eager')"
    if torch._C._are_functorch_transforms_active():
        return "torch.func needs operations that it can transform"
    if internal_dtype(x) == torch.float64:
        return "its Φ is accurate to float32"
    return None
