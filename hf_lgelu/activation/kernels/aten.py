"""λ-GELU on torch operations, with hand-written derivatives that keep only x and λ for backward.

Autograd through the plain form of `eager` would keep four tensors of x's size. The derivatives are
written in differentiable operations, so higher orders, forward mode and `torch.func` work.
"""

from typing import Any

import torch
from torch import Tensor

from hf_lgelu.activation.kernels import eager


class _LambdaGELUFunction(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, hardness: Tensor) -> Tensor:
        return eager.lambda_gelu(x, hardness)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, hardness = ctx.saved_tensors
        return gradients(x, hardness, grad_output, *ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, hardness_tangent: Tensor | None) -> Tensor:
        x, hardness = ctx.saved_tensors
        dtype = eager.internal_dtype(x)
        wide_hardness = hardness.to(dtype)
        v = eager.gate_argument(x.to(dtype), wide_hardness)
        tangent = torch.zeros_like(v)
        if x_tangent is not None:
            tangent = tangent + x_tangent.to(dtype) * eager.derivative_in_x(v)
        if hardness_tangent is not None:
            rate = hardness_tangent.to(dtype) / wide_hardness.square()
            tangent = tangent + rate * eager.scaled_derivative_in_hardness(v)
        return tangent.to(x.dtype)


def gradients(
    x: Tensor, hardness: Tensor, delta: Tensor, needs_x: bool, needs_hardness: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(δ·∂f/∂x, Σδ·∂f/∂λ) for f = x·Φ(λx), in operations that are differentiable in x, λ and δ.

    Args:
        x: any shape.
        hardness: λ, broadcastable to x.
        delta: δ, the incoming gradient, of the shape of x.
        needs_x: whether the first is wanted; None takes its place otherwise.
        needs_hardness: whether the second is.

    Returns:
        Gradients of the shapes and dtypes of `x` and `hardness`; that in x is NaN where x is infinite or NaN.
    """
    dtype = eager.internal_dtype(x)
    wide, wide_hardness, delta = x.to(dtype), hardness.to(dtype), delta.to(dtype)
    v = eager.gate_argument(wide, wide_hardness)
    grad_x = grad_hardness = None
    if needs_x:
        # x − x is 0, or NaN where x is not finite: there u·φ(u) is ∞·0, which the clamp of v hides.
        grad_x = (delta * (eager.derivative_in_x(v) + (wide - wide))).to(x.dtype)
    if needs_hardness:
        # 1/λ² after the sum: one division per λ, and no partial product can overflow.
        summed = (delta * eager.scaled_derivative_in_hardness(v)).sum_to_size(hardness.shape)
        grad_hardness = (summed / wide_hardness.square()).to(hardness.dtype)
    return grad_x, grad_hardness


def lambda_gelu(x: Tensor, hardness: Tensor) -> Tensor:
    """x·Φ(λx); saves x (its own bytes) and λ, and computes ∂λ only where it is needed."""
    return _LambdaGELUFunction.apply(x, hardness)


def refusal(x: Tensor, hardness: Tensor) -> str | None:
    """Why these derivatives cannot be used for this input, or None."""
    # A compiler fuses plain operations, and cannot look into hand-written derivatives as well.
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "torch.compile, torch.export and torch.jit.trace take the plain operations of 'eager'"
    return None
