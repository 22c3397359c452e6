"""The rows that a linear map sees: its inputs as a least-squares problem has them, for Linear and for convolutions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """How the weights of a linear map meet its input.

    Args:
        kind: "linear" (acts on the last axis) or "convolution" (acts on windows of an input (B, C, *S)).
        groups: of a convolution.
        kernel: sizes of the kernel, one per axis of S, as the other three.
        stride: steps between windows.
        padding: zeros before and behind each axis, or "same" or "valid" as in `torch.nn.functional.conv2d`.
        dilation: steps between the elements of a window.
    """

    kind: Literal["linear", "convolution"]
    groups: int = 1
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | Literal["same", "valid"] = ()
    dilation: tuple[int, ...] = ()


def linear_rows(x: Tensor) -> Tensor:
    """Rows of a linear map: its inputs or its outputs (..., d) as (n, 1, d)."""
    return x.reshape(-1, 1, x.shape[-1])


def convolution_rows(x: Tensor, geometry: Geometry, positions: Tensor | None = None) -> Tensor:
    """The windows of a convolution as rows, so that rows · weight.flatten(1)ᵀ are its outputs without bias.

    Only the chosen windows are ever laid out in memory.

    Args:
        x: the convolution's input (B, C, *S).
        geometry: of the convolution.
        positions: (B, p) flat indices into an image's output positions, for each image its own; None takes all.

    Returns:
        (n, groups, C/groups · prod(kernel)), image by image, in the order of `positions`.
    """
    if geometry.kind != "convolution" or x.dim() != len(geometry.kernel) + 2:
        raise ValueError(
            f"an input of shape {tuple(x.shape)} has no windows under {geometry}; accepted: "
            "(batch, channels, *spatial), as many spatial axes as the kernel has"
        )
    if x.shape[1] % geometry.groups:
        raise ValueError(f"{x.shape[1]} channels do not divide into {geometry.groups} groups")
    windows = _windows(x, geometry)
    return _chosen(windows, len(geometry.kernel), positions).reshape(-1, geometry.groups, _width(x, geometry))


def output_rows(y: Tensor, groups: int = 1, positions: Tensor | None = None) -> Tensor:
    """A convolution's outputs (B, M, *S) as (n, groups, M/groups), row for row those of `convolution_rows`.

    A Linear's outputs are rows already: `linear_rows`.
    """
    if y.dim() < 3 or y.shape[1] % groups:
        raise ValueError(
            f"outputs of shape {tuple(y.shape)} are none of a convolution of {groups} groups; accepted: "
            "(batch, channels, *spatial), channels a multiple of the groups"
        )
    return _chosen(y.movedim(1, -1), y.dim() - 2, positions).reshape(-1, groups, y.shape[1] // groups)


def choose_positions(seeds: Sequence[int], available: int, wanted: int) -> Tensor | None:
    """Output positions for each image, drawn without replacement from the image's own seed.

    An image is given the same positions whatever it is batched with and on whichever process.

    Returns:
        (B, wanted) in ascending order, on the CPU; None, which means all, where no more than `wanted` are available.
    """
    if wanted < 1:
        raise ValueError(f"{wanted} positions wanted; accepted: 1 or more")
    if wanted >= available:
        return None
    generator = torch.Generator()
    draws = [torch.randperm(available, generator=generator.manual_seed(seed))[:wanted] for seed in seeds]
    return torch.stack(draws).sort(dim=1).values


def _windows(x: Tensor, geometry: Geometry) -> Tensor:
    """A view (B, *output sizes, C, *kernel) of the padded input."""
    padding = _padding(geometry)
    x = F.pad(x, padding) if any(padding) else x  # no copy without a need
    sizes = tuple(
        (size - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, dilation in zip(
            x.shape[2:], geometry.kernel, geometry.stride, geometry.dilation, strict=True
        )
    )
    if min(sizes) < 1:
        raise ValueError(f"an input of shape {tuple(x.shape)} (padded) is smaller than one window of {geometry}")
    batch, channel, *steps = x.stride()
    return x.as_strided(
        (x.shape[0], *sizes, x.shape[1], *geometry.kernel),
        (
            batch,
            *(step * stride for step, stride in zip(steps, geometry.stride, strict=True)),
            channel,
            *(step * dilation for step, dilation in zip(steps, geometry.dilation, strict=True)),
        ),
    )


def _padding(geometry: Geometry) -> list[int]:
    """Zeros before and behind each axis in the order of `F.pad`: the last axis first."""
    if geometry.padding == "valid":
        sides = [(0, 0)] * len(geometry.kernel)
    elif geometry.padding == "same":  # an odd zero goes behind, as in torch
        totals = [dilation * (kernel - 1) for kernel, dilation in zip(geometry.kernel, geometry.dilation, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(zeros, zeros) for zeros in geometry.padding]
    return [zeros for side in reversed(sides) for zeros in side]


def _chosen(x: Tensor, spatial: int, positions: Tensor | None) -> Tensor:
    """x (B, *S, ...) at the flat positions (B, p) of its `spatial` axes S: (B, p, ...); None leaves it as it is."""
    if positions is None:
        return x
    if positions.dim() != 2 or positions.shape[0] != x.shape[0]:
        raise ValueError(
            f"positions of shape {tuple(positions.shape)} do not fit {x.shape[0]} images; accepted: (B, p)"
        )
    images = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[images, *torch.unravel_index(positions.to(x.device), x.shape[1 : 1 + spatial])]


def _width(x: Tensor, geometry: Geometry) -> int:
    return x.shape[1] // geometry.groups * math.prod(geometry.kernel)
