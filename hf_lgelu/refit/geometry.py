"""What kind of linear map an operation of the graph is, and how wide its rows of features are."""

from dataclasses import replace
from math import prod

from torch.fx import Node

from hf_lgelu.models.dataflow.affine_operations import AffineOperation
from hf_lgelu.models.dataflow.trace import DataFlow, operation_name, shape_of
from hf_lgelu.refit.features import Geometry

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_OPTIONS = (("stride", 1), ("padding", 0), ("dilation", 1))


def as_stored(operation: AffineOperation, flow: DataFlow) -> AffineOperation:
    """The same map with its weight's axes as they are stored, where it is used transposed (Falcon's `x @ weight.T`)."""
    views = [operand for operand in operation.node.all_input_nodes if flow.parameter(operand) == operation.weight]
    if operation.is_direct or operation.input_axis is None or not _is_transposition(views[0], flow):
        return operation
    return replace(operation, output_axis=operation.input_axis, input_axis=operation.output_axis, is_direct=True)


def _is_transposition(view: Node, flow: DataFlow) -> bool:
    if len(shape_of(view)) != 2 or not flow.is_direct(view.args[0]):
        return False
    name = operation_name(view)
    if name == "permute":
        return [axis % 2 for axis in view.args[1]] == [1, 0]
    return name in ("t", "numpy_T") or (name == "transpose" and view.args[1] % 2 != view.args[2] % 2)


def read_geometry(operation: AffineOperation) -> Geometry | None:
    """How the map's features are read off its input; None for one not refitted, as a transposed convolution."""
    node = operation.node
    name = operation_name(node)
    if name in ("linear", "addmm", "mm", "matmul") and operation.channel_axis == -1:
        return Geometry("linear")
    if name not in _CONVOLUTIONS or len(shape_of(node)) != len(shape_of(node.args[1])):  # an image without a batch
        return None
    kernel = shape_of(node.args[1])[2:]
    options = {}
    for position, (option, default) in enumerate(_OPTIONS, start=3):
        value = node.args[position] if len(node.args) > position else default
        options[option] = value if isinstance(value, str) else _per_axis(value, len(kernel))
    return Geometry("convolution", operation.groups, kernel, **options)


def row_width(operation: AffineOperation, geometry: Geometry) -> int:
    """Features of one row: inputs of the map; of a convolution, those of one group, times the kernel's size."""
    if geometry.kind == "linear":
        return shape_of(operation.data)[-1]
    return shape_of(operation.data)[1] // geometry.groups * prod(geometry.kernel)


def _per_axis(value: int | list[int], axes: int) -> tuple[int, ...]:
    values = [value] if isinstance(value, int) else list(value)
    return tuple(values * axes if len(values) == 1 else values)
