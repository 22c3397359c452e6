"""The readable reference: the λ-gates on plain, differentiable torch operations.

This is also the form that exporters see, and torch.compile where `traced` does not serve: Inductor fuses it with its
neighbours and recomputes what the backward pass needs from x.
"""

import torch
from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE, GATES, Gate


def internal_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64 input, float32 for every narrower one."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def gate_argument(x: Tensor, hardness: Tensor, gate: Gate) -> Tensor:
    """v = λx·scale, clamped where G no longer changes; x and `hardness` in the internal dtype."""
    limit = gate.limit(x.dtype)
    # Scaled on λ's side: compiled code does this again for every few elements.
    return torch.clamp(x * (hardness * gate.scale), -limit, limit)


def derivative_in_x(v: Tensor, gate: Gate) -> Tensor:
    """∂f/∂x = G(u) + u·g(u) with u = λx = v/scale."""
    return gate.step(v) + v * (gate.density(v) / gate.scale)


def scaled_derivative_in_hardness(v: Tensor, gate: Gate) -> Tensor:
    """λ²·∂f/∂λ = u²·g(u) with u = λx = v/scale.

    The paper's x²·φ(λx), in a form whose factors stay bounded for any finite x.
    """
    return v * v * (gate.density(v) / gate.scale**2)


def undefined_slope_at_infinity(x: Tensor) -> Tensor:
    """0, with derivative 0 where x is finite and NaN where it is infinite.

    u·g(u) is ∞·0 there, and the plain activation's gradient NaN; the clamp of the gate's argument would hide it.
    """
    return 0 * torch.clamp(x * x, max=1)


def lambda_gate(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> Tensor:
    """x·G(λx) with internals in float32 or wider; the result has the shape and dtype of `x`."""
    row = GATES[gate]
    dtype = internal_dtype(x)
    wide = x.to(dtype)
    y = wide * row.step(gate_argument(wide, hardness.to(dtype), row))
    # Not traced: torch.jit.trace compares what it recorded with a second run, under no_grad.
    if torch.is_grad_enabled() and x.requires_grad and not torch.jit.is_tracing():
        y = y + undefined_slope_at_infinity(wide)
    return y.to(x.dtype)
