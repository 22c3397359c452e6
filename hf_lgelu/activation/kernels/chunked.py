"""The λ-gates on the CPU by torch's own activations, over pieces of a tensor that stay in the cache.

x·G(λx) = a(λx)/λ and ∂f/∂x = a′(λx), a the plain activation: torch has both, vectorized by hand. Over whole tensors the
steps around them would each read and write memory; over pieces they cost little, and one piece is all that they
allocate.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_lgelu.activation.gates import Gate
from hf_lgelu.activation.kernels.plain import internal_dtype, laid_as

CHUNK = 262_144
"""Elements of a piece per thread, 1 MiB in float32: a call of torch's GELU costs as much as 20,000 elements more, so
smaller pieces lose, and larger ones leave the second-level cache."""

LARGEST_HARDNESS = 2.0**100  # beyond it 1/λ nears the subnormal numbers of float32


def forward(x: Tensor, hardness: float, gate: Gate) -> Tensor | None:
    """x·G(λx) in the layout of x, or None where this form is wrong: x is not finite, or λx or their sum overflows.

    Args:
        x: on the CPU, any shape and floating dtype.
        hardness: λ, from 1 to LARGEST_HARDNESS.
        gate: a row of GATES.
    """
    x = _dense(x)
    y = torch.empty_like(x)
    dtype = internal_dtype(x)
    wide = None if x.dtype == dtype else _buffer(x, dtype)
    for x_part, y_part in _parts(x, y):
        u = _scaled(x_part, hardness, y_part if wide is None else wide)
        u.copy_(gate.plain_function(u))
        # An infinite or undefined u makes its value NaN or infinite and so the sum, at a tenth of the value's time.
        if not math.isfinite(u.sum().item()):
            return None
        u.mul_(1 / hardness)
        if wide is not None:
            y_part.copy_(u)
    return y


def backward(
    x: Tensor, hardness: float, gate: Gate, delta: Tensor, needs_x: bool, needs_hardness: bool
) -> tuple[Tensor | None, float]:
    """(δ·∂f/∂x in the layout of x, Σδ·∂f/∂λ), for what `forward` took; what is not needed is None or 0.

    Pieces are added up in float64 and in order: the same bits in each run with as many threads.
    """
    x = _dense(x)
    delta = laid_as(x, delta)
    dtype = internal_dtype(x)
    limit = gate.limit(dtype) / gate.scale
    is_wide = x.dtype == dtype
    grad_x = torch.empty_like(x) if needs_x else None
    u_buffer = _buffer(x, dtype)
    out_buffer = None if is_wide or not needs_x else _buffer(x, dtype)
    delta_buffer = None if is_wide else _buffer(x, dtype)
    total = 0.0
    for x_part, delta_part, grad_part in _parts(x, delta, x if grad_x is None else grad_x):
        # G is 0 or 1 at the limit, and its density no subnormal number: those are slow.
        u = _scaled(x_part, hardness, u_buffer).clamp_(-limit, limit)
        wide_delta = delta_part if delta_buffer is None else _first(delta_buffer, u.numel()).copy_(delta_part)
        if needs_x:
            out = grad_part if out_buffer is None else _first(out_buffer, u.numel())
            gate.plain_backward(wide_delta, u, out)
            if not is_wide:
                grad_part.copy_(out)
        if needs_hardness:
            # Not a dot product: BLAS keeps a float32 sum over the whole piece, off by 1e-4 where terms are alike.
            terms = gate.density(u * gate.scale).mul_(u).mul_(u).mul_(wide_delta)
            total += terms.sum().item()
    return grad_x, total / hardness / hardness


def _scaled(x: Tensor, hardness: float, out: Tensor) -> Tensor:
    """λx in the first elements of `out`, rounded once."""
    out = _first(out, x.numel())
    if x.dtype == out.dtype:
        return torch.mul(x, hardness, out=out)
    return out.copy_(x).mul_(hardness)


def _dense(x: Tensor) -> Tensor:
    """x itself if its elements fill a piece of memory, in any order; else a copy."""
    # torch keeps the strides of such a tensor in what is made like it, and of no other.
    if x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride():
        return x
    return x.contiguous()


def _chunk(x: Tensor) -> int:
    # In float64 λ = 1 is the plain activation to the last bit, whose bits depend on where a vector ends.
    return x.numel() if x.dtype == torch.float64 else CHUNK * torch.get_num_threads()


def _first(buffer: Tensor, count: int) -> Tensor:
    return buffer if buffer.numel() == count else buffer[:count]


def _buffer(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(min(x.numel(), _chunk(x)), dtype=dtype)


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same piece of each of several tensors of one dense layout, in the order of memory."""
    count, chunk = tensors[0].numel(), _chunk(tensors[0])
    flat = tuple(torch.as_strided(tensor, (count,), (1,)) for tensor in tensors)
    if count <= chunk:  # what small tensors take shows in calls, not in elements
        return iter((flat,))
    return zip(*(torch.split(tensor, chunk) for tensor in flat), strict=True)
