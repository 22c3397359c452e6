"""λ-GELU through the compiled kernel, as an autograd function that saves only x and the hardness."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_lgelu.activation.hardness import effective_hardness, hardness_rate
from hf_lgelu.activation.kernels import aten
from hf_lgelu.activation.kernels.cpu.library import DTYPES, MAX_AXES, LoopsArgument, load_failure, load_library
from hf_lgelu.activation.kernels.layout import broadcast_strides, merged_loops, varying_axes
from hf_lgelu.activation.kernels.opaque import must_show_derivatives, opaque_refusal

# With fewer elements per thread, waking the thread costs more than it saves.
_ELEMENTS_PER_THREAD = 16384


def unavailable() -> str | None:
    """Why this kernel cannot run on this machine, or None."""
    return load_failure()


def refusal(x: Tensor, hardness: Tensor) -> str | None:
    """Why the compiled kernel cannot take this input, or None."""
    if x.device.type != "cpu":
        return f"it runs on the CPU, x is on {x.device}"
    if x.dtype not in DTYPES:
        return f"it takes float32 and bfloat16, x is {x.dtype}"
    if (reason := opaque_refusal(x, hardness)) is not None:
        return reason
    if hardness.numel() != 1 and (reason := _shape_refusal(x, hardness)) is not None:
        return reason
    return unavailable()


def _shape_refusal(x: Tensor, hardness: Tensor) -> str | None:
    dense = torch.empty_like(x, device="meta").stride()
    wanted = broadcast_strides(hardness.detach().contiguous(), x.shape)
    if x.numel() > 0 and _plan(x.shape, (dense, wanted, dense), 1) is None:
        return f"a λ of shape {tuple(hardness.shape)} varies along several axes of x's memory, {tuple(x.shape)}"
    return None


def lambda_gelu(x: Tensor, hardness: Tensor) -> Tensor:
    """x·Φ(λx) in one pass; saves x and λ."""
    return _LambdaGELU.apply(x, hardness, None, None)


def learned_lambda_gelu(x: Tensor, raw_hardness: Tensor, temperature: Tensor, override: Tensor) -> Tensor:
    """x·Φ(λx) with one λ formed from s, t and the override in double precision; saves x and s."""
    return _LambdaGELU.apply(x, raw_hardness, temperature, override)


class _LambdaGELU(torch.autograd.Function):
    """Differentiable in x and in the hardness: λ itself, or s where t and the override are given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hardness: Tensor, temperature: Tensor | None, override: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, hardness)
        ctx.temperature, ctx.override, ctx.rate = temperature, override, 1.0
        if temperature is None or override is None:
            used = hardness
        else:
            value, ctx.rate = _learned(hardness.item(), temperature.item(), override.item())
            used = torch.tensor(value)
        # A copy in float32, of one element or one per channel.
        ctx.used = used = used.detach().to(torch.float32).contiguous()
        return _forward(x, used)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, hardness = ctx.saved_tensors
        needs_x, needs_hardness, _, _ = ctx.needs_input_grad
        if must_show_derivatives(delta):
            grad_x, grad_hardness = _differentiable(ctx, x, hardness, delta)
            return grad_x, grad_hardness, None, None
        grad_x, sums = _backward(x, delta, ctx.used, needs_x, needs_hardness and ctx.rate != 0)
        grad_hardness = _hardness_gradient(ctx, hardness, sums) if needs_hardness else None
        return grad_x, grad_hardness, None, None


def _hardness_gradient(ctx: Any, hardness: Tensor, sums: Tensor | None) -> Tensor:
    # 1/λ² after the sum: no partial product can overflow.
    if sums is None:
        return torch.zeros_like(hardness)
    if sums.numel() == 1:  # in Python's numbers, which cost less than operations on one element
        return torch.full_like(hardness, ctx.rate * sums.item() / ctx.used.item() ** 2)
    return (sums / ctx.used.double().square().reshape(-1)).reshape(hardness.shape).to(hardness.dtype)


def _learned(raw_hardness: float, temperature: float, override: float) -> tuple[float, float]:
    """λ and ∂λ/∂s."""
    if override > 0:
        return override, 0.0
    z = raw_hardness / temperature
    if z > 40:  # softplus is the identity to the last bit
        return 1 + z, 1 / temperature
    power = math.exp(z)
    return 1 + math.log1p(power), power / (1 + power) / temperature


def _differentiable(ctx: Any, x: Tensor, hardness: Tensor, delta: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients in operations that autograd and torch.func can differentiate or batch again."""
    needs_x, needs_hardness, _, _ = ctx.needs_input_grad
    if ctx.temperature is None:
        return aten.gradients(x, hardness, delta, needs_x, needs_hardness)
    state = (hardness, ctx.temperature, ctx.override)
    grad_x, grad_hardness = aten.gradients(x, effective_hardness(*state), delta, needs_x, needs_hardness)
    if grad_hardness is not None:
        grad_hardness = grad_hardness * hardness_rate(*state)
    return grad_x, grad_hardness


def _forward(x: Tensor, hardness: Tensor) -> Tensor:
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    plan = _plan(x.shape, (x.stride(), broadcast_strides(hardness, x.shape), y.stride()), 1)
    if plan is None:
        return _forward(y.copy_(x), hardness)
    forward = load_library().forward[x.dtype]
    forward(plan.loops, x.data_ptr(), hardness.data_ptr(), y.data_ptr(), _threads(x))
    return y


def _backward(
    x: Tensor, delta: Tensor, hardness: Tensor, needs_x: bool, needs_sums: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(∂x, Σ δ·u²φ(u) per λ in float64), None for what is not needed."""
    grad_x = torch.empty_like(x) if needs_x else None
    sums = torch.zeros(hardness.numel(), dtype=torch.float64) if needs_sums else None
    if x.numel() == 0 or not (needs_x or needs_sums):
        return grad_x, sums
    out_strides = x.stride() if grad_x is None else grad_x.stride()
    strides = (x.stride(), delta.stride(), broadcast_strides(hardness, x.shape), out_strides)
    plan = _plan(x.shape, strides, 2)
    if plan is None:
        # δ, or x too, lies in an order in which λ changes along several axes: bring both into the result's.
        dense_x = torch.empty_like(x).copy_(x)
        return _backward(dense_x, torch.empty_like(dense_x).copy_(delta), hardness, needs_x, needs_sums)
    load_library().backward[x.dtype](
        *(plan.loops, plan.hardness_axis),
        *(x.data_ptr(), delta.data_ptr(), hardness.data_ptr(), _address(grad_x), _address(sums)),
        _threads(x),
    )
    return grad_x, sums


@dataclass(frozen=True)
class _Plan:
    """How one call walks over its operands."""

    loops: LoopsArgument
    hardness_axis: int  # of the loops; -1 where one λ serves all


@functools.lru_cache(maxsize=4096)
def _plan(shape: torch.Size, strides: tuple[tuple[int, ...], ...], hardness: int) -> _Plan | None:
    """None where the operands cannot be walked over together; `hardness` is the position of λ among them."""
    loops = merged_loops(shape, strides)
    axes = varying_axes(loops.strides[hardness])
    if len(loops.sizes) > MAX_AXES or len(axes) > 1:
        return None
    return _Plan(LoopsArgument.of(loops), axes[0] if axes else -1)


def _threads(x: Tensor) -> int:
    return max(1, min(torch.get_num_threads(), x.numel() // _ELEMENTS_PER_THREAD))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
