"""λ-GELU on torch operations, with hand-written derivatives that keep only x and λ for backward.

Autograd through the plain form of `eager` would keep four more tensors of x's size. On the CPU one λ for all of x goes
through `chunked`; everything else takes formulas over whole tensors. Those are differentiable, so higher orders,
forward mode and `torch.func` work.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hf_lgelu.activation.hardness import effective_hardness, hardness_rate
from hf_lgelu.activation.kernels import chunked, eager
from hf_lgelu.activation.kernels.opaque import is_followed, is_visible_backward, opaque_refusal

_SQRT2 = math.sqrt(2.0)
_INV_SQRT2 = 1.0 / _SQRT2
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


class _WholeFunction(torch.autograd.Function):
    """Over whole tensors: any device, any λ, and every transformation of torch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, hardness: Tensor) -> Tensor:
        return _value(x, hardness)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return gradients(*ctx.saved_tensors, grad_output, *ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, hardness_tangent: Tensor | None) -> Tensor:
        x, hardness = ctx.saved_tensors
        dtype = eager.internal_dtype(x)
        wide_hardness = hardness.to(dtype)
        v = eager.gate_argument(x.to(dtype), wide_hardness)
        tangent = torch.zeros_like(v)
        if x_tangent is not None:
            tangent = tangent + x_tangent.to(dtype) * _slope(v, x)
        if hardness_tangent is not None:
            rate = hardness_tangent.to(dtype) / wide_hardness.square()
            tangent = tangent + rate * _scaled_rate(v, x)
        return tangent.to(x.dtype)


class _ChunkedFunction(torch.autograd.Function):
    """On the CPU, with one λ for all of x; what only the other form can do goes there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hardness: Tensor) -> Tensor:
        ctx.save_for_backward(x, hardness)
        value = hardness.item()
        y = chunked.forward(x, value) if 1 <= value <= chunked.LARGEST_HARDNESS else None
        ctx.is_chunked = y is not None
        return _value(x, hardness) if y is None else y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, hardness = ctx.saved_tensors
        if not ctx.is_chunked or is_visible_backward(x, grad_output):
            return gradients(x, hardness, grad_output, *ctx.needs_input_grad)
        grad_x, total = chunked.backward(x, hardness.item(), grad_output, *ctx.needs_input_grad)
        return grad_x, hardness.new_full(hardness.shape, total) if ctx.needs_input_grad[1] else None


def lambda_gelu(x: Tensor, hardness: Tensor) -> Tensor:
    """x·Φ(λx); saves x (its own bytes) and λ, and computes ∂λ only where it is needed."""
    if hardness.numel() == 1 and x.device.type == hardness.device.type == "cpu" and opaque_refusal(x, hardness) is None:
        return _ChunkedFunction.apply(x, hardness)
    return _WholeFunction.apply(x, hardness)


class _WithoutLearning(torch.autograd.Function):
    """y, with a gradient of exactly 0 for s: s has to stay in the graph, for DistributedDataParallel's reducer."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, raw_hardness: Tensor) -> Tensor:
        ctx.save_for_backward(raw_hardness)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, Tensor | None]:
        (raw_hardness,) = ctx.saved_tensors
        return delta, torch.zeros_like(raw_hardness) if ctx.needs_input_grad[1] else None


def learned_lambda_gelu(x: Tensor, raw_hardness: Tensor, temperature: Tensor, override: Tensor) -> Tensor:
    """`lambda_gelu` at λ = `effective_hardness`; on the CPU ∂λ is not computed while the override rules."""
    # Elsewhere reading the override would wait for the device.
    if opaque_refusal(x, override) is None and override.is_cpu and override.item() > 0:
        return _WithoutLearning.apply(lambda_gelu(x, override.detach()), raw_hardness)
    return lambda_gelu(x, effective_hardness(raw_hardness, temperature, override))


def refusal(x: Tensor, hardness: Tensor) -> str | None:
    """Why these derivatives cannot be used for this input, or None."""
    # What is compiled has `traced`, and what is recorded for elsewhere should hold no derivatives.
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "torch.compile takes 'traced' or 'eager', torch.export and torch.jit.trace take 'eager'"
    return None


def gradients(
    x: Tensor, hardness: Tensor, delta: Tensor, needs_x: bool, needs_hardness: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(δ·∂f/∂x, Σδ·∂f/∂λ) for f = x·Φ(λx); differentiable in x, λ and δ where autograd records.

    Args:
        x: any shape.
        hardness: λ, broadcastable to x.
        delta: δ, the incoming gradient, of the shape of x.
        needs_x: whether the first is wanted; None takes its place otherwise.
        needs_hardness: whether the second is.

    Returns:
        Gradients of the shapes and dtypes of `x` and `hardness`, NaN where x is infinite or NaN.
    """
    dtype = eager.internal_dtype(x)
    wide_hardness = hardness.to(dtype)
    factors = _followed_factors if is_followed(delta) else _overwriting_factors
    in_x, in_hardness = factors(x.to(dtype), wide_hardness, delta.to(dtype), needs_x, needs_hardness)
    grad_x = in_x.to(x.dtype) if in_x is not None else None
    if in_hardness is None:
        return grad_x, None
    # 1/λ² after the sum: one division per λ, and no partial product can overflow.
    return grad_x, (in_hardness.sum_to_size(hardness.shape) / wide_hardness.square()).to(hardness.dtype)


def learned_gradients(
    x: Tensor,
    state: tuple[Tensor, Tensor, Tensor],
    delta: Tensor,
    needs_x: bool,
    needs_raw_hardness: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """`gradients` by x and s, for λ = `effective_hardness(*state)` with state = (s, t, override)."""
    grad_x, grad_hardness = gradients(x, effective_hardness(*state), delta, needs_x, needs_raw_hardness)
    return grad_x, None if grad_hardness is None else grad_hardness * hardness_rate(*state)


def _value(x: Tensor, hardness: Tensor) -> Tensor:
    """`eager.lambda_gelu`, with one tensor besides the result's wide form."""
    dtype = eager.internal_dtype(x)
    wide = x.to(dtype)
    limit = eager.erf_argument_limit(dtype)
    v = torch.clamp(wide * (hardness.to(dtype) * _INV_SQRT2), -limit, limit)
    return v.erf_().mul_(0.5).add_(0.5).mul_(wide).to(x.dtype)


def _slope(v: Tensor, x: Tensor) -> Tensor:
    """∂f/∂x, for v = `eager.gate_argument`."""
    # 0·x is NaN where x is not finite: there u·φ(u) is ∞·0, which the clamp of v hides.
    return torch.add(eager.derivative_in_x(v), x, alpha=0)


def _scaled_rate(v: Tensor, x: Tensor) -> Tensor:
    """λ²·∂f/∂λ, likewise."""
    return torch.add(eager.scaled_derivative_in_hardness(v), x, alpha=0)


def _followed_factors(
    x: Tensor, hardness: Tensor, delta: Tensor, needs_x: bool, needs_hardness: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(δ·∂f/∂x, δ·λ²∂f/∂λ) per element, in the internal dtype."""
    v = eager.gate_argument(x, hardness)
    in_x = delta * _slope(v, x) if needs_x else None
    return in_x, delta * _scaled_rate(v, x) if needs_hardness else None


def _overwriting_factors(
    x: Tensor, hardness: Tensor, delta: Tensor, needs_x: bool, needs_hardness: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The same, over three tensors: each step overwrites what is no longer needed."""
    v = eager.gate_argument(x, hardness)
    slope = v.square().neg_().exp_().mul_(_SQRT2 * _INV_SQRT_2PI).mul_(v)  # u·φ(u)
    in_hardness = (slope * v).mul_(_SQRT2).add_(x, alpha=0).mul_(delta) if needs_hardness else None
    if not needs_x:
        return None, in_hardness
    in_x = v.erf_().mul_(0.5).add_(0.5).add_(slope).add_(x, alpha=0).mul_(delta)
    return in_x, in_hardness
