"""The λ-gates on torch operations, with hand-written derivatives that keep only x and λ for backward.

Autograd through the form in `plain` would keep four more tensors of x's size. On the CPU a single λ goes through
`chunked`; everything else takes formulas over whole tensors. These formulas are differentiable, so higher orders,
forward mode and `torch.func` work.
"""

from typing import Any

import torch
from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE, GATES, Gate
from hf_lgelu.activation.hardness import effective_hardness, hardness_rate
from hf_lgelu.activation.kernels import chunked, plain
from hf_lgelu.activation.kernels.plain import is_followed, is_plain, is_visible_backward, opaque_refusal


class _WholeFunction(torch.autograd.Function):
    """The gate over whole tensors: any device, any λ, and every transformation of torch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, hardness: Tensor, gate: str) -> Tensor:
        return _value(x, hardness, GATES[gate])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
        x, hardness, ctx.gate = inputs
        ctx.save_for_backward(x, hardness)
        ctx.save_for_forward(x, hardness)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, hardness = ctx.saved_tensors
        needs_x, needs_hardness = ctx.needs_input_grad[:2]
        return *gradients(x, hardness, grad_output, needs_x, needs_hardness, ctx.gate), None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, hardness_tangent: Tensor | None, _: None) -> Tensor:
        x, hardness = ctx.saved_tensors
        gate = GATES[ctx.gate]
        dtype = plain.internal_dtype(x)
        wide_hardness = hardness.to(dtype)
        v = plain.gate_argument(x.to(dtype), wide_hardness, gate)
        tangent = torch.zeros_like(v)
        if x_tangent is not None:
            tangent = tangent + x_tangent.to(dtype) * _slope(v, x, gate)
        if hardness_tangent is not None:
            rate = hardness_tangent.to(dtype) / wide_hardness.square()
            tangent = tangent + rate * _scaled_rate(v, x, gate)
        return tangent.to(x.dtype)


class _ChunkedFunction(torch.autograd.Function):
    """The gate on the CPU with one λ for all of x. `_WholeFunction`'s formulas do what this form cannot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hardness: Tensor, gate: str) -> Tensor:
        ctx.save_for_backward(x, hardness)
        ctx.gate = gate
        value = hardness.item()
        y = chunked.forward(x, value, GATES[gate]) if 1 <= value <= chunked.LARGEST_HARDNESS else None
        ctx.is_chunked = y is not None
        return _value(x, hardness, GATES[gate]) if y is None else y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, hardness = ctx.saved_tensors
        needs_x, needs_hardness, _ = ctx.needs_input_grad
        if not ctx.is_chunked or is_visible_backward(x, grad_output):
            return *gradients(x, hardness, grad_output, needs_x, needs_hardness, ctx.gate), None
        grad_x, total = chunked.backward(x, hardness.item(), GATES[ctx.gate], grad_output, needs_x, needs_hardness)
        return grad_x, hardness.new_full(hardness.shape, total) if needs_hardness else None, None


def lambda_gate(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> Tensor:
    """x·G(λx); saves x (its own bytes) and λ, and computes ∂λ only if it is needed."""
    if hardness.numel() == 1 and x.device.type == hardness.device.type == "cpu" and opaque_refusal(x, hardness) is None:
        return _ChunkedFunction.apply(x, hardness, gate)
    return _WholeFunction.apply(x, hardness, gate)


def refusal(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> str | None:
    """The reason why these derivatives cannot be used for this input, or None."""
    # Compiled code has `traced`, and code recorded for use elsewhere should hold no derivatives.
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "torch.compile takes 'traced' or 'eager', torch.export and torch.jit.trace take 'eager'"
    return None


def gradients(
    x: Tensor, hardness: Tensor, delta: Tensor, needs_x: bool, needs_hardness: bool, gate: str = DEFAULT_GATE
) -> tuple[Tensor | None, Tensor | None]:
    """(δ·∂f/∂x, Σδ·∂f/∂λ) for f = x·G(λx), None for a gradient that is not needed; NaN where x is infinite or NaN.

    Differentiable in x, λ and δ where autograd records.
    """
    row = GATES[gate]
    dtype = plain.internal_dtype(x)
    wide_hardness = hardness.to(dtype)
    # With a tensor subclass nothing is written into a plain tensor: the subclass would be lost.
    is_visible = is_followed(delta) or not all(map(is_plain, (x, hardness, delta)))
    factors = _followed_factors if is_visible else _overwriting_factors
    v, delta = plain.gate_argument(x.to(dtype), wide_hardness, row), delta.to(dtype)
    in_x, in_hardness = factors(v, x, delta, needs_x, needs_hardness, row)
    grad_x = in_x.to(x.dtype) if in_x is not None else None
    if in_hardness is None:
        return grad_x, None
    # 1/λ² after the sum: one division per λ, and no partial product can overflow.
    return grad_x, (in_hardness.sum_to_size(hardness.shape) / wide_hardness.square()).to(hardness.dtype)


def learned_gradients(
    x: Tensor,
    state: tuple[Tensor, Tensor | None, Tensor | None],
    delta: Tensor,
    needs_x: bool,
    needs_raw_hardness: bool,
    gate: str,
) -> tuple[Tensor | None, Tensor | None]:
    """`gradients` in x and s for a state (s, t, override), or in x and λ for (λ, None, None)."""
    hardness, temperature, override = state
    if temperature is None or override is None:
        return gradients(x, hardness, delta, needs_x, needs_raw_hardness, gate)
    hardness = effective_hardness(hardness, temperature, override)
    grad_x, grad_hardness = gradients(x, hardness, delta, needs_x, needs_raw_hardness, gate)
    return grad_x, None if grad_hardness is None else grad_hardness * hardness_rate(state[0], temperature, override)


def _value(x: Tensor, hardness: Tensor, gate: Gate) -> Tensor:
    dtype = plain.internal_dtype(x)
    wide, hardness = x.to(dtype), hardness.to(dtype)
    y = wide * gate.step(plain.gate_argument(wide, hardness, gate))
    if dtype == torch.float64:
        # Equal to the plain activation at λ = 1 to the last bit, as long as λx does not overflow.
        u = wide * hardness
        y = torch.where(torch.isfinite(u), gate.plain_function(u) / hardness, y)
    return y.to(x.dtype)


def _slope(v: Tensor, x: Tensor, gate: Gate) -> Tensor:
    """∂f/∂x = G(u) + u·g(u), for v = `plain.gate_argument` and u = λx = v/scale."""
    # 0·x is NaN where x is not finite: there u·g(u) is ∞·0, which the clamp of v hides.
    return torch.add(gate.step(v) + v * (gate.density(v) / gate.scale), x, alpha=0)


def _scaled_rate(v: Tensor, x: Tensor, gate: Gate) -> Tensor:
    """λ²·∂f/∂λ = u²·g(u): the paper's x²·φ(λx), in a form whose factors stay bounded for any finite x."""
    return torch.add(v * v * (gate.density(v) / gate.scale**2), x, alpha=0)


def _followed_factors(
    v: Tensor, x: Tensor, delta: Tensor, needs_x: bool, needs_hardness: bool, gate: Gate
) -> tuple[Tensor | None, Tensor | None]:
    """(δ·∂f/∂x, δ·λ²∂f/∂λ) per element, in the internal dtype."""
    in_x = delta * _slope(v, x, gate) if needs_x else None
    return in_x, delta * _scaled_rate(v, x, gate) if needs_hardness else None


def _overwriting_factors(
    v: Tensor, x: Tensor, delta: Tensor, needs_x: bool, needs_hardness: bool, gate: Gate
) -> tuple[Tensor | None, Tensor | None]:
    """The same with fewer tensors in memory: steps overwrite tensors that are no longer needed."""
    step = gate.step(v) if needs_x else None
    slope = gate.density(v).mul_(v).div_(gate.scale)  # u·g(u)
    in_hardness = (slope * v).div_(gate.scale).add_(x, alpha=0).mul_(delta) if needs_hardness else None
    return None if step is None else step.add_(slope).add_(x, alpha=0).mul_(delta), in_hardness
