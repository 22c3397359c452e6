"""How the elements of a call are laid out for the kernels: as one run, or as (outer, channel, inner)."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from hf_lgelu.activation.kernels.layout import broadcast_strides, merged_loops, varying_axes

MAX_LOOPS = 6
"""Nested loops that a kernel is compiled for, at most."""

FLAT_BLOCK = 2048
"""Elements per program of the flat kernels, and per tile of the others at most. It fixes how ∂λ is added up: a
constant, never tuned to the device, so that the bits repeat."""

_ROW = 64
# Consecutive elements that a tile should at least have for coalesced access, and the longest row it starts with.
_LONG_ROW = 1024
# Indices stay in 32 bits while the last one of a program past the end does.
_NARROW = 2**31 - 2 * FLAT_BLOCK

OperandStrides = tuple[tuple[int, ...], int, tuple[int, ...]]


@dataclass(frozen=True)
class Pattern:
    """The loops over a call's operands, split around the one along which λ changes.

    Attributes:
        outer_sizes: of the loops around λ's, the innermost last; (1,) if there are none.
        channels: how many values λ has.
        inner_sizes: of the loops inside λ's, the innermost last; (1,) if there are none.
        strides: for each operand, its steps (outer, channel, inner) in elements.
        flat: the elements are one run over the memory of every operand, with one λ.
        wide: indices or offsets need 64 bits.
        tile: elements of outer, channel and inner in one program's tile, powers of two.
    """

    outer_sizes: tuple[int, ...]
    channels: int
    inner_sizes: tuple[int, ...]
    strides: tuple[OperandStrides, ...]
    flat: bool
    wide: bool
    tile: tuple[int, int, int]

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The number of tiles along outer, channel and inner."""
        outer, channels, inner = self.tile
        return -(-prod(self.outer_sizes) // outer), -(-self.channels // channels), -(-prod(self.inner_sizes) // inner)


@lru_cache(maxsize=4096)
def find_pattern(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], hardness_shape: tuple[int, ...]
) -> Pattern | str:
    """The pattern of operands of `shape` with `strides`, in the order of the first, under a contiguous λ.

    Returns a string, the reason, where there is none. No size may be 0.
    """
    hardness = broadcast_strides(torch.empty(hardness_shape, device="meta"), torch.Size(shape))
    loops = merged_loops(shape, (*strides, hardness))
    if len(loops.sizes) > MAX_LOOPS:
        return f"the operands' strides make {len(loops.sizes)} nested loops, it has at most {MAX_LOOPS}"
    along = varying_axes(loops.strides[-1])
    if len(along) > 1:
        return f"hardness of shape {hardness_shape} changes along more than one axis in the memory of x"
    last = len(loops.sizes) - 1
    before, after = (along[0], along[0] + 1) if along else (last, last)
    outer, inner = loops.sizes[:before] or (1,), loops.sizes[after:] or (1,)
    channels = loops.sizes[along[0]] if along else 1
    steps = tuple(
        (stride[:before] or (0,), stride[along[0]] if along else 0, stride[after:] or (0,))
        for stride in loops.strides[:-1]
    )
    largest = max(sum((n - 1) * s for n, s in zip(loops.sizes, stride, strict=True)) for stride in loops.strides)
    return Pattern(
        outer_sizes=outer,
        channels=channels,
        inner_sizes=inner,
        strides=steps,
        flat=len(loops.sizes) == 1 and not along and all(s == ((0,), 0, (1,)) for s in steps),
        wide=max(largest, prod(outer), channels, prod(inner)) >= _NARROW,
        tile=_tile(prod(outer), channels, prod(inner)),
    )


@lru_cache(maxsize=4096)
def result_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that `torch.empty_like` gives a tensor like one of `shape` and `strides`."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def _tile(outer: int, channels: int, inner: int) -> tuple[int, int, int]:
    # A row of the memory first, then what makes the sums over it longer, then whatever is left to fill.
    block_i = min(_power_of_two(inner), _LONG_ROW)
    block_c = min(_power_of_two(channels), max(1, _ROW // block_i))
    block_o = min(_power_of_two(outer), FLAT_BLOCK // (block_i * block_c))
    block_c = min(_power_of_two(channels), FLAT_BLOCK // (block_i * block_o))
    block_i = min(_power_of_two(inner), FLAT_BLOCK // (block_c * block_o))
    return block_o, block_c, block_i


def _power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
