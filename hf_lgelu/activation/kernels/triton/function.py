"""The λ-gates through the Triton kernels, as an autograd function that saves only x and the hardness."""

from typing import Any

import torch
from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.kernels import aten
from hf_lgelu.activation.kernels.opaque import is_visible_backward


def lambda_gate(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> Tensor:
    """x·G(λx) in one pass; saves x and λ."""
    return _LambdaGate.apply(x, hardness, None, None, gate)


def learned_lambda_gate(
    x: Tensor, raw_hardness: Tensor, temperature: Tensor, override: Tensor, gate: str = DEFAULT_GATE
) -> Tensor:
    """x·G(λx) with one λ formed from s, t and the override on the device; saves x and those three."""
    return _LambdaGate.apply(x, raw_hardness, temperature, override, gate)


class _LambdaGate(torch.autograd.Function):
    """Differentiable in x and in the hardness: λ itself, or s where t and the override are given."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, hardness: Tensor, temperature: Tensor | None, override: Tensor | None, gate: str
    ) -> Tensor:
        # Not at the top: whoever has no use for the kernels need not have Triton.
        from hf_lgelu.activation.kernels.triton import launch

        ctx.save_for_backward(x, hardness, temperature, override)
        ctx.gate = gate
        return launch.forward(x, launch.Hardness(hardness.contiguous(), temperature, override), gate)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        from hf_lgelu.activation.kernels.triton import launch

        x, hardness, temperature, override = ctx.saved_tensors
        needs_x, needs_hardness = ctx.needs_input_grad[:2]
        if is_visible_backward(x, delta):
            if temperature is None:
                return *aten.gradients(x, hardness, delta, needs_x, needs_hardness, ctx.gate), None, None, None
            state = (hardness, temperature, override)
            return *aten.learned_gradients(x, state, delta, needs_x, needs_hardness, ctx.gate), None, None, None
        where = launch.Hardness(hardness.contiguous(), temperature, override)
        return *launch.backward(x, delta, where, needs_x, needs_hardness, ctx.gate), None, None, None
