"""The λ-gates through the compiled kernel, as an autograd function that saves only x and the hardness."""

import math
from typing import Any

import torch
from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.kernels import aten
from hf_lgelu.activation.kernels.cpu import passes
from hf_lgelu.activation.kernels.cpu.library import DTYPES, GATES, load_failure
from hf_lgelu.activation.kernels.opaque import is_visible_backward, opaque_refusal


def unavailable() -> str | None:
    """Why this kernel cannot run on this machine, or None."""
    return load_failure(DEFAULT_GATE)


def refusal(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> str | None:
    """Why the compiled kernel cannot take this input, or None."""
    if gate not in GATES:
        return f"it has no formula for {gate}"
    if not (x.is_cpu and hardness.is_cpu):
        return f"it runs on the CPU, x is on {x.device} and the hardness on {hardness.device}"
    if x.dtype not in DTYPES:
        return f"it takes float32 and bfloat16, x is {x.dtype}"
    if (reason := opaque_refusal(x, hardness)) is not None:
        return reason
    if hardness.numel() != 1 and not passes.can_walk(x, hardness):
        shapes = f"λ, {tuple(hardness.shape)}, changes in the memory of x, {tuple(x.shape)},"
        return f"{shapes} too often or along several axes"
    return load_failure(gate)


def lambda_gate(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> Tensor:
    """x·G(λx) in one pass; saves x and λ."""
    return _LambdaGate.apply(x, hardness, None, None, gate)


def learned_lambda_gate(
    x: Tensor, raw_hardness: Tensor, temperature: Tensor, override: Tensor, gate: str = DEFAULT_GATE
) -> Tensor:
    """x·G(λx) with one λ formed from s, t and the override in double precision; saves x and s."""
    return _LambdaGate.apply(x, raw_hardness, temperature, override, gate)


class _LambdaGate(torch.autograd.Function):
    """Differentiable in x and in the hardness: λ itself, or s where t and the override are given."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, hardness: Tensor, temperature: Tensor | None, override: Tensor | None, gate: str
    ) -> Tensor:
        ctx.save_for_backward(x, hardness)
        ctx.gate = gate
        ctx.state, ctx.rate = None, 1.0
        if hardness.numel() != 1:
            ctx.used = passes.Several(hardness.detach().to(torch.float32).contiguous())
        elif temperature is None or override is None:
            ctx.used = passes.One(hardness.item())
        else:
            # As numbers: hardening may write to the override before the backward pass.
            ctx.state = temperature.item(), override.item()
            value, ctx.rate = _learned(hardness.item(), *ctx.state)
            ctx.used = passes.One(value)
        return passes.forward(x, ctx.used, gate)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, hardness = ctx.saved_tensors
        needs_x, needs_hardness = ctx.needs_input_grad[:2]
        grad_x, grad_hardness = _gradients(ctx, x, hardness, delta, needs_x, needs_hardness)
        return grad_x, grad_hardness, None, None, None


def _gradients(
    ctx: Any, x: Tensor, hardness: Tensor, delta: Tensor, needs_x: bool, needs_hardness: bool
) -> tuple[Tensor | None, Tensor | None]:
    if is_visible_backward(x, delta):
        if ctx.state is None:
            return aten.gradients(x, hardness, delta, needs_x, needs_hardness, ctx.gate)
        state = (hardness, *(torch.full_like(hardness, number) for number in ctx.state))
        return aten.learned_gradients(x, state, delta, needs_x, needs_hardness, ctx.gate)
    sums = ctx.used.new_sums() if needs_hardness and ctx.rate != 0 else None
    grad_x = passes.backward(x, delta, ctx.used, ctx.gate, needs_x, sums)
    if not needs_hardness:
        return grad_x, None
    return grad_x, torch.zeros_like(hardness) if sums is None else ctx.used.gradient(sums, ctx.rate, hardness)


def _learned(raw_hardness: float, temperature: float, override: float) -> tuple[float, float]:
    """λ and ∂λ/∂s."""
    if override >= 1:
        return override, 0.0
    if temperature == 0:  # of a state that was never filled
        return math.nan, math.nan
    z = raw_hardness / temperature
    if z > 40:  # softplus is the identity to the last bit
        return 1 + z, 1 / temperature
    power = math.exp(z)
    return 1 + math.log1p(power), power / (1 + power) / temperature
