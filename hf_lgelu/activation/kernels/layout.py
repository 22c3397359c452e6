"""How tensors lie in memory: the loops that a kernel runs over operands of any strides, without a copy."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Loops:
    """Nested loops over the elements of several operands of one shape, with as few axes as their strides allow.

    Attributes:
        sizes: of the loops, the innermost last; at least one.
        strides: for each operand, its step per loop in elements. 0 where it is broadcast.
    """

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4096)
def merged_loops(shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> Loops:
    """The loops over operands of `shape` with `strides`, in the memory order of the first operand.

    Axes of size 1 vanish, and neighbours merge where every operand steps through both as through one.
    """
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    # Stable, so that axes along which the first operand is broadcast keep their order.
    axes.sort(key=lambda axis: -abs(strides[0][axis]))
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis in axes:
        if sizes and all(s[-1] == stride[axis] * shape[axis] for s, stride in zip(steps, strides, strict=True)):
            sizes[-1] *= shape[axis]
            for s, stride in zip(steps, strides, strict=True):
                s[-1] = stride[axis]
        else:
            sizes.append(shape[axis])
            for s, stride in zip(steps, strides, strict=True):
                s.append(stride[axis])
    if not sizes:
        return Loops((1,), tuple((0,) for _ in strides))
    return Loops(tuple(sizes), tuple(tuple(s) for s in steps))


def broadcast_strides(tensor: Tensor, shape: torch.Size) -> tuple[int, ...]:
    """The strides of `tensor` expanded to `shape`."""
    if tensor.numel() == 1:
        return (0,) * len(shape)
    missing = len(shape) - tensor.dim()
    return (0,) * missing + tuple(
        0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def varying_axes(strides: tuple[int, ...]) -> tuple[int, ...]:
    """The loops along which an operand of these strides moves."""
    return tuple(axis for axis, stride in enumerate(strides) if stride != 0)
