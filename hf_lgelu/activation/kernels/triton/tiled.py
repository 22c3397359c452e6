"""The kernels for every other layout: one λ per channel, strides, operands that lie differently.

The elements are (outer, channel, inner), where outer and inner may each be several nested loops: a tuple of
sizes, and per operand a tuple of strides, innermost last. A program takes a tile of consecutive indices of each.
"""

import triton
import triton.language as tl

from hf_lgelu.activation.kernels.triton.formulas import derivatives, is_frozen, one_hardness, value


@triton.jit
def _offsets(index, sizes, strides):
    # Unrolled: the loop variable indexes tuples.
    offset = index * 0
    for k in tl.static_range(len(sizes) - 1, 0, -1):
        offset += (index % sizes[k]) * strides[k]
        index = index // sizes[k]
    return offset + index * strides[0]


@triton.jit
def _tile(blocks_c, blocks_i, tile_o: tl.constexpr, tile_c: tl.constexpr, tile_i: tl.constexpr, wide: tl.constexpr):
    # Neighbouring programs take neighbouring inner indices, then channels: the order of the memory.
    program = tl.program_id(0)
    block_i = program % blocks_i
    block_c = program // blocks_i % blocks_c
    block_o = program // blocks_i // blocks_c
    row = block_o * blocks_i + block_i
    if wide:
        block_i, block_c, block_o = block_i.to(tl.int64), block_c.to(tl.int64), block_o.to(tl.int64)
    o = (block_o * tile_o + tl.arange(0, tile_o))[:, None, None]
    c = (block_c * tile_c + tl.arange(0, tile_c))[None, :, None]
    i = (block_i * tile_i + tl.arange(0, tile_i))[None, None, :]
    return o, c, i, row


@triton.jit
def _pointers(ptr, o, c, i, outer_sizes, inner_sizes, strides):
    return ptr + (_offsets(o, outer_sizes, strides[0]) + c * strides[1] + _offsets(i, inner_sizes, strides[2]))


@triton.jit
def _hardness(hardness_ptr, temperature_ptr, override_ptr, c, channels, per_channel: tl.constexpr):
    if per_channel:
        hardness = tl.load(hardness_ptr + c, mask=c < channels, other=1.0).to(tl.float32)
    else:
        hardness = one_hardness(hardness_ptr, temperature_ptr, override_ptr)
    return hardness


@triton.jit
def forward(
    x_ptr,
    y_ptr,
    hardness_ptr,
    temperature_ptr,
    override_ptr,
    outer_sizes,
    inner_sizes,
    x_strides,
    y_strides,
    outer,
    channels,
    inner,
    blocks_c,
    blocks_i,
    tile_o: tl.constexpr,
    tile_c: tl.constexpr,
    tile_i: tl.constexpr,
    wide: tl.constexpr,
    per_channel: tl.constexpr,
    gate: tl.constexpr,
):
    """y = x·G(λx)."""
    o, c, i, _ = _tile(blocks_c, blocks_i, tile_o, tile_c, tile_i, wide)
    hardness = _hardness(hardness_ptr, temperature_ptr, override_ptr, c, channels, per_channel)
    inside = (o < outer) & (c < channels) & (i < inner)
    x = tl.load(_pointers(x_ptr, o, c, i, outer_sizes, inner_sizes, x_strides), mask=inside, other=0.0).to(tl.float32)
    y = value(x, hardness, gate).to(y_ptr.dtype.element_ty)
    tl.store(_pointers(y_ptr, o, c, i, outer_sizes, inner_sizes, y_strides), y, mask=inside)


@triton.jit
def backward(
    x_ptr,
    delta_ptr,
    grad_x_ptr,
    partial_ptr,
    hardness_ptr,
    temperature_ptr,
    override_ptr,
    outer_sizes,
    inner_sizes,
    x_strides,
    delta_strides,
    grad_x_strides,
    outer,
    channels,
    inner,
    blocks_c,
    blocks_i,
    tile_o: tl.constexpr,
    tile_c: tl.constexpr,
    tile_i: tl.constexpr,
    wide: tl.constexpr,
    per_channel: tl.constexpr,
    gate: tl.constexpr,
):
    """δ·∂f/∂x, and per program and channel the sum of δ·λ·∂f/∂λ; either pointer may be None."""
    o, c, i, row = _tile(blocks_c, blocks_i, tile_o, tile_c, tile_i, wide)
    hardness = _hardness(hardness_ptr, temperature_ptr, override_ptr, c, channels, per_channel)
    inside = (o < outer) & (c < channels) & (i < inner)
    x_at = _pointers(x_ptr, o, c, i, outer_sizes, inner_sizes, x_strides)
    delta_at = _pointers(delta_ptr, o, c, i, outer_sizes, inner_sizes, delta_strides)
    # Outside both are 0, which adds nothing to the sums.
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_at, mask=inside, other=0.0).to(tl.float32)
    in_x, in_hardness = derivatives(x, hardness, gate)
    if grad_x_ptr is not None:
        grad_x_at = _pointers(grad_x_ptr, o, c, i, outer_sizes, inner_sizes, grad_x_strides)
        tl.store(grad_x_at, (delta * in_x).to(grad_x_ptr.dtype.element_ty), mask=inside)
    if partial_ptr is not None and not is_frozen(override_ptr):
        sums = tl.sum(tl.sum(delta * in_hardness, axis=2), axis=0)
        channel = tl.reshape(c, (tile_c,))
        tl.store(partial_ptr + row * channels + channel, sums, mask=channel < channels)
