"""λ-GELU through the Triton kernels, as an autograd function that saves only x and the hardness."""

from typing import Any

import torch
from torch import Tensor

from hf_lgelu.activation.kernels import aten
from hf_lgelu.activation.kernels.opaque import is_visible_backward


def lambda_gelu(x: Tensor, hardness: Tensor) -> Tensor:
    """x·Φ(λx) in one pass; saves x and λ."""
    return _LambdaGELU.apply(x, hardness, None, None)


def learned_lambda_gelu(x: Tensor, raw_hardness: Tensor, temperature: Tensor, override: Tensor) -> Tensor:
    """x·Φ(λx) with one λ formed from s, t and the override on the device; saves x and those three."""
    return _LambdaGELU.apply(x, raw_hardness, temperature, override)


class _LambdaGELU(torch.autograd.Function):
    """Differentiable in x and in the hardness: λ itself, or s where t and the override are given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hardness: Tensor, temperature: Tensor | None, override: Tensor | None) -> Tensor:
        # Not at the top: whoever has no use for the kernels need not have Triton.
        from hf_lgelu.activation.kernels.triton import launch

        ctx.save_for_backward(x, hardness, temperature, override)
        return launch.forward(x, launch.Hardness(hardness.contiguous(), temperature, override))

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        from hf_lgelu.activation.kernels.triton import launch

        x, hardness, temperature, override = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if is_visible_backward(x, delta):
            if temperature is None:
                return *aten.gradients(x, hardness, delta, *needs), None, None
            return *aten.learned_gradients(x, (hardness, temperature, override), delta, *needs), None, None
        where = launch.Hardness(hardness.contiguous(), temperature, override)
        return *launch.backward(x, delta, where, *needs), None, None
