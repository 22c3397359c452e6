"""Operations that are affine in their data, with parameters of their own: layers that can absorb λ."""

from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from hf_lgelu.models.dataflow.trace import CONVOLUTIONS, DataFlow, operation_name, shape_of

_TRANSPOSED = frozenset(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))


@dataclass(frozen=True)
class AffineOperation:
    """output = weight · data + bias, where the weight is a parameter, and the bias is one or absent.

    Multiplying weight and bias by λ multiplies the output; dividing the weight by λ undoes a factor of the data.

    Args:
        data: the operand.
        weight, bias: names of the parameters; a bias alone (`weight` None) is a sum with a parameter.
        channel_axis: the axis of data and output, from the right, along which the layer mixes (linear,
            convolution) or scales (normalization); None where every axis is scaled (weight aligned at the right).
        output_axis: the weight's axis along the output's channels; None as above.
        input_axis: that along the data's channels; None for an operation that mixes nothing.
        groups: of a convolution.
        is_direct: False where the weight is used through a view, with other axes.
    """

    node: Node
    data: Node
    weight: str | None
    bias: str | None = None
    channel_axis: int | None = None
    output_axis: int | None = None
    input_axis: int | None = None
    groups: int = 1
    is_direct: bool = True

    @property
    def weight_name(self) -> str:
        """`weight`, or a ValueError for a sum with a bias alone."""
        if self.weight is None:
            raise ValueError(f"{self.node.name} is a sum with a bias, and has no weight")
        return self.weight

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the weight and the bias, if there are any."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def mixes(self) -> bool:
        """Whether the operation is linear in the data with a weight of its own: a layer that can take 1/λ."""
        return self.input_axis is not None


def read_affine(node: Node, flow: DataFlow) -> AffineOperation | None:
    """`node` as an affine operation with parameters of its own, or None."""
    name = operation_name(node)
    if name == "linear":
        data, weight, bias = _padded(node, 3)
        return _layer(node, flow, data, weight, bias, channel_axis=-1, output_axis=0, input_axis=1)
    if name == "addmm" and not node.kwargs:
        bias, data, weight = node.args
        return _layer(node, flow, data, weight, bias, channel_axis=-1, output_axis=1, input_axis=0)
    if name in ("mm", "matmul"):
        left, right = node.args
        if flow.parameter(right) is not None and len(shape_of(right)) == 2:
            return _layer(node, flow, left, right, None, channel_axis=-1, output_axis=1, input_axis=0)
        if flow.parameter(left) is not None and len(shape_of(left)) == 2 and len(shape_of(right)) > 1:
            return _layer(node, flow, right, left, None, channel_axis=-2, output_axis=0, input_axis=1)
        return None
    if name in CONVOLUTIONS or name in _TRANSPOSED or name == "convolution":
        return _convolution(node, flow, name)
    if name in ("mul", "add", "sub"):
        return _elementwise(node, flow, name)
    if name in ("batch_norm", "group_norm"):
        data, *parameters = _padded(node, 4)
        weight, bias = parameters[:2] if name == "batch_norm" else parameters[1:]
        return _layer(node, flow, data, weight, bias, channel_axis=1 - len(shape_of(data)), output_axis=0)
    if name in ("layer_norm", "rms_norm"):
        data, _, weight, bias = _padded(node, 4)
        return _layer(node, flow, data, weight, None if name == "rms_norm" else bias)  # an epsilon stands there
    return None


def _padded(node: Node, count: int) -> list[Any]:
    return [*node.args[:count], *[None] * (count - len(node.args))]


def _layer(node: Node, flow: DataFlow, data: Any, weight: Any, bias: Any, **axes: Any) -> AffineOperation | None:
    name = flow.parameter(weight)
    bias_name = flow.parameter(bias)
    if name is None or flow.parameter(data) is not None or (bias is not None and bias_name is None):
        return None
    return AffineOperation(node, data, name, bias_name, is_direct=flow.is_direct(weight), **axes)


def _convolution(node: Node, flow: DataFlow, name: str) -> AffineOperation | None:
    data, weight, bias = _padded(node, 3)
    if name == "convolution":
        transposed, groups = bool(node.args[6]), node.args[8]
    else:
        transposed = name in _TRANSPOSED
        groups = node.args[6] if len(node.args) > 6 else 1
    output_axis, input_axis = (1, 0) if transposed else (0, 1)
    operation = _layer(
        node, flow, data, weight, bias,
        channel_axis=1 - len(shape_of(weight)), output_axis=output_axis, input_axis=input_axis, groups=groups,
    )  # fmt: skip
    # A group of a transposed convolution has no simple order of channels in the weight.
    return replace(operation, is_direct=False) if operation and transposed and groups > 1 else operation


def _elementwise(node: Node, flow: DataFlow, name: str) -> AffineOperation | None:
    left, right = node.args[:2]
    named = [operand for operand in (left, right) if flow.parameter(operand) is not None]
    if len(named) != 1 or not (isinstance(left, Node) and isinstance(right, Node)):
        return None
    parameter = named[0]
    data = right if parameter is left else left
    if shape_of(node) != shape_of(data):
        return None
    weight, bias = (flow.parameter(parameter), None) if name == "mul" else (None, flow.parameter(parameter))
    return AffineOperation(node, data, weight, bias, is_direct=flow.is_direct(parameter))
