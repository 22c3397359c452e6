"""The affine operations of a recording: the maps with weights of the network's own, and their geometry."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from hf_lgelu.graph.recorder import operation_name
from hf_lgelu.graph.recording import Recording, StoredValue

COPIES = frozenset(("clone", "contiguous", "alias", "detach", "_to_copy", "to", "dropout"))
"""In eval mode these operations keep every value in its place, except for rounding to another dtype."""

RESHAPES = frozenset(("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"))
"""These operations keep the order of the elements."""

CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of the tensor that a node stands for, on the recorded inputs."""
    return node.meta["shape"]


_TRANSPOSED = frozenset(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))


@dataclass(frozen=True)
class AffineOperation:
    """output = weight · data + bias, where a parameter or buffer sets the weight, and the bias if there is one.

    Multiplying weight and bias by λ multiplies the output; dividing the weight by λ undoes a factor of the data.

    With only a bias (`weight` None) it is a sum with a parameter. `channel_axis`
    is the axis of data and output, from the right, along which the layer mixes (linear, convolution) or scales
    (normalization); None where every axis is scaled (weight aligned at the right). `output_axis` is the weight's axis
    along the output's channels, and None in the same case. `input_axis` is the weight's axis along the data's channels,
    and None for an operation that mixes nothing. A linear map's axes are those of the stored weight, where it is used
    transposed.
    """

    node: Node
    data: Node
    weight: StoredValue | None
    bias: StoredValue | None = None
    channel_axis: int | None = None
    output_axis: int | None = None
    input_axis: int | None = None
    groups: int = 1

    @property
    def weight_name(self) -> str:
        """The name of the parameter or buffer that sets the weight; "" for a sum with only a bias."""
        return "" if self.weight is None else self.weight.name

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the weight and the bias, if there are any."""
        return tuple(each.name for each in (self.weight, self.bias) if each is not None)

    @property
    def mixes(self) -> bool:
        """Whether the operation mixes channels by a weight of its own: a layer that can absorb 1/λ."""
        return self.input_axis is not None

    @property
    def is_direct(self) -> bool:
        """Whether the weight is a stored tensor itself."""
        return self.weight is not None and not self.weight.views

    def module_in(self, model: nn.Module) -> nn.Module:
        """The module of a model that holds the weight."""
        return model.get_submodule(self.weight_name.rpartition(".")[0])

    def weight_in(self, model: nn.Module) -> Tensor:
        """The weight in a model, (outputs, inputs), of a convolution (outputs, inputs of a group, *kernel)."""
        weight = cast(StoredValue, self.weight).read(model)
        if operation_name(self.node) in _TRANSPOSED:
            return self._exchanged(weight)
        return weight.T if self.output_axis == 1 else weight

    def write_weight(self, model: nn.Module, value: Tensor) -> None:
        """Set the weight in a model to a value of the shape of `weight_in`."""
        if operation_name(self.node) in _TRANSPOSED:
            value = self._exchanged(value)
        elif self.output_axis == 1:
            value = value.T
        cast(StoredValue, self.weight).write(model, value)

    def _exchanged(self, weight: Tensor) -> Tensor:
        """Inputs for outputs in each group, and the kernel from its end: this makes a transposed convolution plain."""
        weight = weight.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        return weight.flip([*range(2, weight.ndim)])


def read_affine(node: Node, recording: Recording) -> AffineOperation | None:
    """`node` as an affine operation with parameters of its own, or None."""
    name = operation_name(node)
    if name == "linear":
        data, weight, bias = _padded(node, 3)
        return _layer(node, recording, data, weight, bias, channel_axis=-1, output_axis=0, input_axis=1)
    if name == "addmm" and not node.kwargs:
        bias, data, weight = node.args
        return _layer(node, recording, data, weight, bias, channel_axis=-1, output_axis=1, input_axis=0)
    if name in ("mm", "matmul"):
        left, right = node.args
        if recording.stored_value(right, or_buffer=True) and len(shape_of(right)) == 2:
            return _layer(node, recording, left, right, None, channel_axis=-1, output_axis=1, input_axis=0)
        if recording.parameter(left) is not None and len(shape_of(left)) == 2 and len(shape_of(right)) > 1:
            return _layer(node, recording, right, left, None, channel_axis=-2, output_axis=0, input_axis=1)
        return None
    if name in CONVOLUTIONS or name in _TRANSPOSED:
        data, weight, bias = _padded(node, 3)
        transposed, groups = name in _TRANSPOSED, node.args[6] if len(node.args) > 6 else 1  # in both at this place
        axes = {"output_axis": int(transposed), "input_axis": int(not transposed), "groups": groups}
        return _layer(node, recording, data, weight, bias, channel_axis=1 - len(shape_of(weight)), **axes)
    if name in ("mul", "add", "sub"):
        left, right = node.args[:2]
        named = [operand for operand in (left, right) if recording.parameter(operand) is not None]
        if len(named) != 1 or not (isinstance(left, Node) and isinstance(right, Node)):
            return None
        data = right if named[0] is left else left
        if shape_of(node) != shape_of(data):
            return None
        stored = recording.stored_value(named[0])
        return AffineOperation(node, data, stored) if name == "mul" else AffineOperation(node, data, None, stored)
    if name in ("batch_norm", "group_norm"):
        data, *parameters = _padded(node, 4)
        weight, bias = parameters[:2] if name == "batch_norm" else parameters[1:]
        return _layer(node, recording, data, weight, bias, channel_axis=1 - len(shape_of(data)), output_axis=0)
    if name in ("layer_norm", "rms_norm"):
        data, _, weight, bias = _padded(node, 4)
        bias = None if name == "rms_norm" else bias  # an epsilon stands there
        return _layer(node, recording, data, weight, bias)
    return None


def _padded(node: Node, count: int) -> list[Any]:
    return [*node.args[:count], *[None] * (count - len(node.args))]


def _layer(node: Node, recording: Recording, data: Any, weight: Any, bias: Any, **axes: Any) -> AffineOperation | None:
    # A fixed filter, as in a pooling without aliases, is a buffer and has groups.
    stored = recording.stored_value(weight, or_buffer="input_axis" in axes and axes.get("groups", 1) == 1)
    added = recording.stored_value(bias)
    if stored is None or recording.parameter(data) is not None or (bias is not None and added is None):
        return None
    while "input_axis" in axes and stored.views and _is_turn(stored.views[0]):
        stored = replace(stored, views=stored.views[1:])
        axes["output_axis"], axes["input_axis"] = axes["input_axis"], axes["output_axis"]
    return AffineOperation(node, data, stored, added, **axes)


def _is_turn(view: Node) -> bool:
    """Whether an operation exchanges the axes of a matrix (Falcon's `x @ weight.T`)."""
    name = operation_name(view)
    return len(shape_of(view)) == 2 and (
        name in ("t", "numpy_T")
        or (name == "permute" and [axis % 2 for axis in view.args[1]] == [1, 0])
        or (name == "transpose" and view.args[1] % 2 != view.args[2] % 2)
    )


@dataclass(frozen=True)
class Geometry:
    """The way a map's weights meet its input: on the last axis, or on windows of (B, C, *S) in a convolution.

    Kernel, stride and dilation are those of `torch.nn.functional.conv2d`, one number for each axis of S. `padding` has
    the numbers of zeros before and after each axis. A transposed convolution is one with stride 1 whose input is spread
    out first: `spread` is the distance of its values.
    """

    kind: Literal["linear", "convolution"]
    groups: int = 1
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    spread: tuple[int, ...] = ()

    def feature_rows(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """The input as rows (n, groups, features), so that rows · weight.flatten(1)ᵀ are the outputs without bias.

        `positions` (B, p) are flat indices into the output positions of each image; None takes all. Only the chosen
        windows of a convolution are ever laid out in memory.
        """
        if self.kind == "linear":
            return x.reshape(-1, 1, x.shape[-1])
        rows = _chosen(self._windows(x), len(self.kernel), positions)
        return rows.reshape(-1, self.groups, self.width(x.shape[1]))

    def width(self, channels: int) -> int:
        """The number of features in a row of a convolution whose input has `channels` channels."""
        return channels // self.groups * math.prod(self.kernel)

    def output_rows(self, y: Tensor, positions: Tensor | None = None) -> Tensor:
        """The outputs, (..., m) or (B, M, *S), as (n, groups, M/groups), in the row order of `feature_rows`."""
        if self.kind == "linear":
            return y.reshape(-1, 1, y.shape[-1])
        rows = _chosen(y.movedim(1, -1), len(self.kernel), positions)
        return rows.reshape(-1, self.groups, y.shape[1] // self.groups)

    def _windows(self, x: Tensor) -> Tensor:
        """A view (B, *output sizes, C, *kernel) of the padded input."""
        for axis, distance in enumerate(self.spread, 2):
            if distance > 1:
                apart = x.new_zeros(*x.shape[: axis + 1], distance, *x.shape[axis + 1 :])
                apart.select(axis + 1, 0).copy_(x)
                x = apart.flatten(axis, axis + 1).narrow(axis, 0, (x.shape[axis] - 1) * distance + 1)
        around = [zeros for side in reversed(self.padding) for zeros in side]  # `F.pad` takes the last axis first
        x = F.pad(x, around) if any(around) else x  # no copy without a need
        for axis, (kernel, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True), 2):
            reach = dilation * (kernel - 1) + 1
            x = x.unfold(axis, reach, stride)[..., ::dilation]
        return x.movedim(1, 1 + len(self.kernel))


def read_geometry(operation: AffineOperation) -> Geometry | None:
    """The geometry of a map; None for a map that is not refitted, such as a convolution without a batch."""
    node = operation.node
    name = operation_name(node)
    if name in ("linear", "addmm", "mm", "matmul") and operation.channel_axis == -1:
        return Geometry("linear")
    if name not in CONVOLUTIONS | _TRANSPOSED or len(shape_of(node)) != len(shape_of(node.args[1])):
        return None
    kernel, (stride, padding, *rest) = shape_of(node.args[1])[2:], _padded(node, 8)[3:]

    def each(value: Any, default: int) -> tuple[int, ...]:
        values = (default,) if value is None else (value,) if isinstance(value, int) else tuple(value)
        return values * len(kernel) if len(values) == 1 else values

    stride, dilation = each(stride, 1), each(rest[2 if name in _TRANSPOSED else 0], 1)
    reach = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    if name in _TRANSPOSED:
        ends = zip(reach, each(padding, 0), each(rest[0], 0), strict=True)
        sides = tuple((all_ - cut, all_ - cut + more) for all_, cut, more in ends)
        return Geometry("convolution", operation.groups, kernel, (1,) * len(kernel), sides, dilation, stride)
    if padding == "same":  # an odd zero goes to the end, as in torch
        sides = tuple((total // 2, total - total // 2) for total in reach)
    else:
        sides = tuple((zeros, zeros) for zeros in each(0 if padding == "valid" else padding, 0))
    return Geometry("convolution", operation.groups, kernel, stride, sides, dilation)


def choose_positions(seeds: Sequence[int], available: int, wanted: int) -> Tensor | None:
    """(B, wanted) output positions of images in ascending order, on the CPU; None where `wanted` takes all of them.

    Positions are drawn without replacement from each image's own seed, so they are the same in every batch and process.
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
