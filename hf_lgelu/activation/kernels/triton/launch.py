"""Allocation and launches: one kernel forward, one backward and, for ∂λ, a small one that adds up.

Nothing here waits for the device. Importing this module imports Triton.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.kernels.triton import flat, reduction, tiled
from hf_lgelu.activation.kernels.triton.pattern import FLAT_BLOCK, Pattern, find_pattern, result_strides

# Fused multiply-add by name: from Triton 3.10 on the default is off.
_FUSED = {"enable_fp_fusion": True}
_OPTIONS = {"num_warps": 4, **_FUSED}
# Of the second stage: partial sums that are loaded at once.
_SUMS_BLOCK = 4096
_SUMS_OPTIONS = {"num_warps": 8, **_FUSED}


@dataclass(frozen=True)
class Hardness:
    """Where the kernels read λ.

    Attributes:
        values: λ itself, contiguous; or s, of one element, where the other two are given.
        temperature: t, of one element, or None.
        override: the λ that rules where it is at least 1, of one element, or None.
    """

    values: Tensor
    temperature: Tensor | None = None
    override: Tensor | None = None

    @property
    def pointers(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """In the order of the kernels' arguments."""
        return self.values, self.temperature, self.override


def forward(x: Tensor, hardness: Hardness, gate: str = DEFAULT_GATE) -> Tensor:
    """x·G(λx) in the dtype and, as torch's own functions do, in the memory order of `x`."""
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    pattern = _known(_find(x, x, hardness.values))
    with torch.cuda.device_of(x):
        if pattern.flat:
            grid, n = _flat_grid(x)
            flat.forward[grid](x, y, *hardness.pointers, n, **_flat_arguments(pattern, gate))
        else:
            y_strides, x_strides, _ = pattern.strides
            tiled.forward[_tiled_grid(pattern)](
                x, y, *hardness.pointers, pattern.outer_sizes, pattern.inner_sizes, x_strides, y_strides,
                **_tile_arguments(pattern, gate),
            )  # fmt: skip
    return y


def backward(
    x: Tensor, delta: Tensor, hardness: Hardness, needs_x: bool, needs_hardness: bool, gate: str = DEFAULT_GATE
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x, and of λ or s; None for what is not needed."""
    values = hardness.values
    if x.numel() == 0:
        return torch.empty_like(x) if needs_x else None, torch.zeros_like(values) if needs_hardness else None
    pattern = _find(x, delta, values)
    if isinstance(pattern, str):
        # δ lies so that it takes more loops than the kernels have; in the layout of the result it does not.
        delta = torch.empty_like(x).copy_(delta)
        pattern = _known(_find(x, delta, values))
    programs = _flat_grid(x)[0][0] if pattern.flat else pattern.blocks[0] * pattern.blocks[2]
    partial = x.new_empty((programs, pattern.channels), dtype=torch.float32) if needs_hardness else None
    grad_x = torch.empty_like(x) if needs_x else None
    with torch.cuda.device_of(x):
        _launch_backward(pattern, gate, x, delta, grad_x, partial, hardness)
        return grad_x, None if partial is None else _finished(partial, hardness)


def _launch_backward(
    pattern: Pattern,
    gate: str,
    x: Tensor,
    delta: Tensor,
    grad_x: Tensor | None,
    partial: Tensor | None,
    hardness: Hardness,
) -> None:
    tensors = (x, delta, grad_x, partial, *hardness.pointers)
    if pattern.flat:
        grid, n = _flat_grid(x)
        flat.backward[grid](*tensors, n, **_flat_arguments(pattern, gate))
    else:
        grad_x_strides, x_strides, delta_strides = pattern.strides
        tiled.backward[_tiled_grid(pattern)](
            *tensors, pattern.outer_sizes, pattern.inner_sizes, x_strides, delta_strides, grad_x_strides,
            **_tile_arguments(pattern, gate),
        )  # fmt: skip


def _finished(partial: Tensor, hardness: Hardness) -> Tensor:
    programs, channels = partial.shape
    out = torch.empty_like(hardness.values)
    block_c = min(64, 1 << (channels - 1).bit_length())
    reduction.finish[(-(-channels // block_c),)](
        partial, out, *hardness.pointers, programs, channels,
        block=_SUMS_BLOCK // block_c, block_c=block_c, **_SUMS_OPTIONS,
    )  # fmt: skip
    return out


def _find(x: Tensor, other: Tensor, hardness: Tensor) -> Pattern | str:
    """The pattern of (result, x, other): a forward pass has no third operand and names x again."""
    shape, strides = tuple(x.shape), x.stride()
    return find_pattern(shape, (result_strides(shape, strides), strides, other.stride()), tuple(hardness.shape))


def _known(pattern: Pattern | str) -> Pattern:
    if isinstance(pattern, str):
        raise RuntimeError(f"the kernel 'triton' cannot take this input: {pattern}")
    return pattern


def _flat_grid(x: Tensor) -> tuple[tuple[int], int]:
    n = x.numel()
    return (-(-n // FLAT_BLOCK),), n


def _tiled_grid(pattern: Pattern) -> tuple[int]:
    blocks_o, blocks_c, blocks_i = pattern.blocks
    return (blocks_o * blocks_c * blocks_i,)


def _flat_arguments(pattern: Pattern, gate: str) -> dict[str, int | bool | str]:
    return {"block": FLAT_BLOCK, "wide": pattern.wide, "gate": gate, **_OPTIONS}


def _tile_arguments(pattern: Pattern, gate: str) -> dict[str, int | bool | str]:
    tile_o, tile_c, tile_i = pattern.tile
    _, blocks_c, blocks_i = pattern.blocks
    return {
        "outer": prod(pattern.outer_sizes),
        "channels": pattern.channels,
        "inner": prod(pattern.inner_sizes),
        "blocks_c": blocks_c,
        "blocks_i": blocks_i,
        "tile_o": tile_o,
        "tile_c": tile_c,
        "tile_i": tile_i,
        "wide": pattern.wide,
        "per_channel": pattern.channels > 1,
        "gate": gate,
        **_OPTIONS,
    }
