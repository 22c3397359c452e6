"""The readable reference: λ-GELU on plain, differentiable torch operations.

This is also the form that exporters see, and torch.compile where `traced` does not serve: Inductor fuses it with its
neighbours and recomputes what the backward pass needs from x.
"""

import math

import torch
from torch import Tensor

_SQRT2 = math.sqrt(2.0)
_INV_SQRT2 = 1.0 / _SQRT2
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


def internal_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64 input, float32 for every narrower one."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def erf_argument_limit(dtype: torch.dtype) -> float:
    """Where |λx/√2| is clamped. Beyond it Φ is exactly 0 or 1 in `dtype`.

    The limit is as wide as it can be while e^(−limit²) stays a normal number: subnormals slow the
    kernels two- to threefold, and λx itself may overflow to infinity.
    """
    return 26.0 if dtype == torch.float64 else 9.0


def gate_argument(x: Tensor, hardness: Tensor) -> Tensor:
    """λx/√2, clamped; x and `hardness` in the internal dtype."""
    limit = erf_argument_limit(x.dtype)
    # Not divided by √2: compiled code does this again for every few elements, and a division shows.
    return torch.clamp(x * (hardness * _INV_SQRT2), -limit, limit)


def gaussian_cdf(v: Tensor) -> Tensor:
    """Φ(v·√2)."""
    return 0.5 * torch.erf(v) + 0.5


def gaussian_pdf(v: Tensor) -> Tensor:
    """φ(v·√2)."""
    return _INV_SQRT_2PI * torch.exp(-v * v)


def derivative_in_x(v: Tensor) -> Tensor:
    """∂f/∂x = Φ(u) + u·φ(u) with u = λx = v·√2."""
    return gaussian_cdf(v) + _SQRT2 * v * gaussian_pdf(v)


def scaled_derivative_in_hardness(v: Tensor) -> Tensor:
    """λ²·∂f/∂λ = u²·φ(u) with u = λx = v·√2.

    The paper's x²·φ(λx), in a form whose factors stay bounded for any finite x.
    """
    return 2 * v * v * gaussian_pdf(v)


def undefined_slope_at_infinity(x: Tensor) -> Tensor:
    """0, with derivative 0 where x is finite and NaN where it is infinite.

    u·φ(u) is ∞·0 there, and nn.GELU's gradient NaN; the clamp of the gate's argument would hide it.
    """
    return 0 * torch.clamp(x * x, max=1)


def lambda_gelu(x: Tensor, hardness: Tensor) -> Tensor:
    """x·Φ(λx) with internals in float32 or wider; the result has the shape and dtype of `x`."""
    dtype = internal_dtype(x)
    wide = x.to(dtype)
    y = wide * gaussian_cdf(gate_argument(wide, hardness.to(dtype)))
    # Not traced: torch.jit.trace compares what it recorded with a second run, under no_grad.
    if torch.is_grad_enabled() and x.requires_grad and not torch.jit.is_tracing():
        y = y + undefined_slope_at_infinity(wide)
    return y.to(x.dtype)
