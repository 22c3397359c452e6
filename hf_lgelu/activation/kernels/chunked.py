"""The λ-gates on the CPU by torch's own activations, over pieces of a tensor that fit into the cache.

x·G(λx) = a(λx)/λ and ∂f/∂x = a′(λx), where a is the plain activation. torch has both, vectorized by hand. Over whole
tensors, each of the steps around them would read and write memory. Over pieces these steps cost little, and they
allocate one piece only.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_lgelu.activation.gates import Gate
from hf_lgelu.activation.kernels.plain import internal_dtype, laid_as

CHUNK = 262_144
"""Elements of a piece per thread, 1 MiB in float32. A call of torch's GELU has an overhead of 20,000 elements, so
smaller pieces are slower, and larger pieces leave the second-level cache."""

LARGEST_HARDNESS = 2.0**100  # beyond it 1/λ nears the subnormal numbers of float32


def forward(x: Tensor, hardness: float, gate: Gate) -> Tensor | None:
    """x·G(λx) in the layout of x, or None where this form fails: x is not finite, or λx or the sum of values overflows.

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
        # An infinite or NaN u makes the sum infinite or NaN; the sum takes a tenth of the time of the values.
        if not math.isfinite(u.sum().item()):
            return None
        u.mul_(1 / hardness)
        if wide is not None:
            y_part.copy_(u)
    return y


def backward(
    x: Tensor, hardness: float, gate: Gate, delta: Tensor, needs_x: bool, needs_hardness: bool
) -> tuple[Tensor | None, float]:
    """(δ·∂f/∂x in the layout of x, Σδ·∂f/∂λ), for an x that `forward` took; a result that is not needed is None or 0.

    Pieces are added up in float64 and in order, so runs with equally many threads give the same bits.
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
        # G is 0 or 1 at the limit, and its density no subnormal number, which would be slow.
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
    """x itself if its elements fill a piece of memory without gaps, in any order; else a copy."""
    # `empty_like` keeps the strides of a tensor without gaps, and of no other tensor.
    if x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride():
        return x
    return x.contiguous()


def _chunk(x: Tensor) -> int:
    # In float64, λ = 1 gives the plain activation to the last bit. Its bits depend on where a vector ends.
    return x.numel() if x.dtype == torch.float64 else CHUNK * torch.get_num_threads()


def _first(buffer: Tensor, count: int) -> Tensor:
    return buffer if buffer.numel() == count else buffer[:count]


def _buffer(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(min(x.numel(), _chunk(x)), dtype=dtype)


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same piece of each of several tensors of one dense layout, in the order of memory."""
    count, chunk = tensors[0].numel(), _chunk(tensors[0])
    flat = tuple(torch.as_strided(tensor, (count,), (1,)) for tensor in tensors)
    if count <= chunk:  # the time of small tensors depends on calls, not on elements
        return iter((flat,))
    return zip(*(torch.split(tensor, chunk) for tensor in flat), strict=True)
