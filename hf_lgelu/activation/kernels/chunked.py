"""λ-GELU on the CPU by torch's own GELU kernels, over pieces of a tensor that stay in the cache.

x·Φ(λx) = gelu(λx)/λ and ∂f/∂x = gelu′(λx): torch has both, vectorized by hand. Over whole tensors the steps around
them would each read and write memory; over pieces they cost little, and one piece is all that they allocate.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_lgelu.activation.kernels.eager import erf_argument_limit, internal_dtype
from hf_lgelu.activation.kernels.layout import merged_loops

CHUNK = 262_144
"""Elements of a piece per thread, 1 MiB in float32: a call of torch's GELU costs as much as 20,000 elements more, so
smaller pieces lose, and larger ones leave the second-level cache."""

LARGEST_HARDNESS = 2.0**100
"""Beyond it 1/λ nears the subnormal numbers of float32."""

# φ(u) = 2^(c·u²)/√(2π): torch.exp2 is four times as fast as torch.exp.
_LOG2_DENSITY = -0.5 / math.log(2.0)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)


def forward(x: Tensor, hardness: float) -> Tensor | None:
    """x·Φ(λx) in the layout of x, or None where this form is wrong: x is not finite, or λx or their sum overflows.

    Args:
        x: on the CPU, any shape and floating dtype.
        hardness: λ, from 1 to LARGEST_HARDNESS.
    """
    x = _dense(x)
    y = torch.empty_like(x)
    dtype = internal_dtype(x)
    wide = None if x.dtype == dtype else _buffer(x, dtype)
    for x_part, y_part in _parts(x, y):
        u = _scaled(x_part, hardness, y_part if wide is None else wide)
        torch.ops.aten.gelu.out(u, out=u)
        # An infinite or undefined u makes its gelu NaN or infinite and so the sum, at a tenth of gelu's own time.
        if not math.isfinite(u.sum().item()):
            return None
        u.mul_(1 / hardness)
        if wide is not None:
            y_part.copy_(u)
    return y


def backward(
    x: Tensor, hardness: float, delta: Tensor, needs_x: bool, needs_hardness: bool
) -> tuple[Tensor | None, float]:
    """(δ·∂f/∂x in the layout of x, Σδ·∂f/∂λ), for what `forward` took; what is not needed is None or 0.

    Pieces are added up in float64 and in order: the same bits in each run with as many threads.
    """
    x = _dense(x)
    delta = _in_layout_of(x, delta)
    dtype = internal_dtype(x)
    limit = math.sqrt(2.0) * erf_argument_limit(dtype)
    is_wide = x.dtype == dtype
    grad_x = torch.empty_like(x) if needs_x else None
    u_buffer = _buffer(x, dtype)
    out_buffer = None if is_wide and needs_x else _buffer(x, dtype)
    delta_buffer = None if is_wide else _buffer(x, dtype)
    zero, total = u_buffer.new_zeros(()), 0.0
    for x_part, delta_part, grad_part in _parts(x, delta, x if grad_x is None else grad_x):
        # Φ is 0 or 1 at the limit, and φ is still a normal number: subnormals are slow.
        u = _scaled(x_part, hardness, u_buffer).clamp_(-limit, limit)
        wide_delta = delta_part if delta_buffer is None else _first(delta_buffer, u.numel()).copy_(delta_part)
        out = grad_part if out_buffer is None else _first(out_buffer, u.numel())
        if needs_hardness:
            total += _sum_of_terms(u, wide_delta, out, zero)
        if needs_x:
            torch.ops.aten.gelu_backward.grad_input(wide_delta, u, grad_input=out)
            if not is_wide:
                grad_part.copy_(out)
    return grad_x, total * _INV_SQRT_2PI / hardness / hardness


def _sum_of_terms(u: Tensor, delta: Tensor, scratch: Tensor, zero: Tensor) -> float:
    """√(2π)·Σδ·u²·φ(u)."""
    torch.addcmul(zero, u, u, value=_LOG2_DENSITY, out=scratch)
    # Not a dot product: BLAS keeps a float32 sum over the whole piece, off by 1e-4 where terms are alike.
    return scratch.exp2_().mul_(u).mul_(u).mul_(delta).sum().item()


def _scaled(x: Tensor, hardness: float, out: Tensor) -> Tensor:
    """λx in the first elements of `out`, rounded once."""
    out = _first(out, x.numel())
    if x.dtype == out.dtype:
        return torch.mul(x, hardness, out=out)
    return out.copy_(x).mul_(hardness)


def _dense(x: Tensor) -> Tensor:
    """x itself if its elements fill a piece of memory, in any order; else a copy."""
    if x.is_contiguous() or merged_loops(x.shape, (x.stride(),)).strides == ((1,),):
        return x
    return x.contiguous()


def _in_layout_of(x: Tensor, delta: Tensor) -> Tensor:
    if delta.stride() == x.stride() or (delta.is_contiguous() and x.is_contiguous()):
        return delta
    return torch.empty_like(x).copy_(delta)


def _chunk() -> int:
    return CHUNK * torch.get_num_threads()


def _first(buffer: Tensor, count: int) -> Tensor:
    return buffer if buffer.numel() == count else buffer[:count]


def _buffer(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(min(x.numel(), _chunk()), dtype=dtype)


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same piece of each of several tensors of one dense layout, in the order of memory."""
    count, chunk = tensors[0].numel(), _chunk()
    flat = tuple(torch.as_strided(tensor, (count,), (1,)) for tensor in tensors)
    if count <= chunk:  # what small tensors take shows in calls, not in elements
        return iter((flat,))
    return zip(*(torch.split(tensor, chunk) for tensor in flat), strict=True)
