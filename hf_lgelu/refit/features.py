"""The rows of a linear map's least-squares problem, read from its input: for Linear and for convolutions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_lgelu.models.dataflow import CONVOLUTIONS, AffineOperation, operation_name, shape_of

_OPTIONS = (("stride", 1), ("padding", 0), ("dilation", 1))


@dataclass(frozen=True)
class Geometry:
    """How the weights of a linear map meet its input.

    Args:
        kind: "linear" (acts on the last axis) or "convolution" (acts on windows of an input (B, C, *S)).
        groups: of a convolution.
        kernel: sizes of the kernel, one for each axis of S; so are stride, padding and dilation.
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

    def feature_rows(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """The map's input as rows, so that rows · weight.flatten(1)ᵀ are its outputs without bias.

        Only the chosen windows of a convolution are ever laid out in memory.

        Args:
            x: (..., d), of a convolution (B, C, *S).
            positions: (B, p) flat indices into an image's output positions, for each image its own; None takes all.

        Returns (n, groups, features): of a convolution C/groups · prod(kernel) of them, image by image.
        """
        if self.kind == "linear":
            return x.reshape(-1, 1, x.shape[-1])
        width = x.shape[1] // self.groups * math.prod(self.kernel)
        return _chosen(self._windows(x), len(self.kernel), positions).reshape(-1, self.groups, width)

    def output_rows(self, y: Tensor, positions: Tensor | None = None) -> Tensor:
        """The map's outputs, (..., m) or (B, M, *S), as (n, groups, M/groups), row for row those of `feature_rows`."""
        if self.kind == "linear":
            return y.reshape(-1, 1, y.shape[-1])
        rows = _chosen(y.movedim(1, -1), len(self.kernel), positions)
        return rows.reshape(-1, self.groups, y.shape[1] // self.groups)

    def _windows(self, x: Tensor) -> Tensor:
        """A view (B, *output sizes, C, *kernel) of the padded input."""
        if self.padding == "same":  # an odd zero goes behind, as in torch
            totals = [dilation * (kernel - 1) for kernel, dilation in zip(self.kernel, self.dilation, strict=True)]
            sides = [(total // 2, total - total // 2) for total in totals]
        else:
            sides = [] if self.padding == "valid" else [(zeros, zeros) for zeros in self.padding]
        around = [zeros for side in reversed(sides) for zeros in side]  # `F.pad` takes the last axis first
        x = F.pad(x, around) if any(around) else x  # no copy without a need
        for axis, (kernel, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True), 2):
            reach = dilation * (kernel - 1) + 1
            x = x.unfold(axis, reach, stride)[..., ::dilation]
        return x.movedim(1, 1 + len(self.kernel))


def read_geometry(operation: AffineOperation) -> Geometry | None:
    """The geometry of a map; None for a map that is not refitted, such as a transposed convolution."""
    node = operation.node
    name = operation_name(node)
    if name in ("linear", "addmm", "mm", "matmul") and operation.channel_axis == -1:
        return Geometry("linear")
    if name not in CONVOLUTIONS or len(shape_of(node)) != len(shape_of(node.args[1])):  # an image without a batch
        return None
    kernel = shape_of(node.args[1])[2:]
    options: dict[str, Any] = {}
    for position, (option, default) in enumerate(_OPTIONS, start=3):
        value = node.args[position] if len(node.args) > position else default
        if not isinstance(value, str):
            values = (value,) if isinstance(value, int) else tuple(value)
            value = values * len(kernel) if len(values) == 1 else values
        options[option] = value
    return Geometry("convolution", operation.groups, kernel, **options)


def row_width(operation: AffineOperation, geometry: Geometry) -> int:
    """The number of features in a row: inputs of the map, or of a group of a convolution times the kernel's size."""
    if geometry.kind == "linear":
        return shape_of(operation.data)[-1]
    return shape_of(operation.data)[1] // geometry.groups * math.prod(geometry.kernel)


def choose_positions(seeds: Sequence[int], available: int, wanted: int) -> Tensor | None:
    """(B, wanted) output positions of images in ascending order, on the CPU; None where there are no more.

    They are drawn without replacement from each image's own seed: the same in every batch and on every process.
    """
    if wanted >= available:
        return None
    generator = torch.Generator()
    draws = [torch.randperm(available, generator=generator.manual_seed(seed))[:wanted] for seed in seeds]
    return torch.stack(draws).sort(dim=1).values


def _chosen(x: Tensor, spatial: int, positions: Tensor | None) -> Tensor:
    """x (B, *S, ...) at the flat positions (B, p) of its `spatial` axes S: (B, p, ...); None leaves it as it is."""
    if positions is None:
        return x
    images = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[images, *torch.unravel_index(positions.to(x.device), x.shape[1 : 1 + spatial])]
