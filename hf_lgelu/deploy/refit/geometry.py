"""What kind of linear map an operation of the graph is, and how wide its rows of features are."""

from math import prod

from hf_lgelu.deploy.dataflow.affine_operations import AffineOperation
from hf_lgelu.deploy.dataflow.trace import operation_name, shape_of
from hf_lgelu.deploy.refit.features import Geometry

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_OPTIONS = (("stride", 1), ("padding", 0), ("dilation", 1))


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
