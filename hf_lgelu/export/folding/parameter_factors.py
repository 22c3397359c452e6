"""λ laid along the axis of a weight or bias that belongs to a layer's channels."""

import torch
from torch import Tensor

from hf_lgelu.export.folding.neighbours import NotFoldableError
from hf_lgelu.models.dataflow.affine_operations import AffineOperation
from hf_lgelu.models.dataflow.trace import describe, shape_of


def along_output(
    operation: AffineOperation, name: str, parameter: Tensor, hardness: Tensor, axis: int | None
) -> Tensor:
    """The factor that multiplies the layer's output by λ, for its parameter `name` (weight or bias).

    Args:
        hardness: one λ, or one for each index of `axis`.
        axis: of the operation's output, from 0; None for one λ.

    Returns:
        A tensor of the dtype of `hardness`, broadcastable to the parameter.

    Raises NotFoldableError if the parameter has no axis of these channels.
    """
    if axis is None:
        return hardness.reshape(1)
    rank = len(shape_of(operation.node))
    if operation.channel_axis is None:  # aligned with the output at the right, as in broadcasting
        weight_axis = axis - rank + parameter.dim()
    elif axis != rank + operation.channel_axis:
        weight_axis = -1
    else:
        weight_axis = operation.output_axis if name == operation.weight else 0
    return _laid(operation, parameter, hardness, weight_axis)


def along_input(operation: AffineOperation, parameter: Tensor, hardness: Tensor, axis: int | None) -> Tensor:
    """The factor of the layer's weight that multiplies the layer's data by λ; as `along_output`.

    `axis` is one of the operation's data.
    """
    if axis is None:
        return hardness.reshape(1)
    fits = axis == len(shape_of(operation.data)) + operation.channel_axis
    if operation.groups == 1:
        return _laid(operation, parameter, hardness, operation.input_axis if fits else -1)
    if not fits or not operation.is_direct:
        raise NotFoldableError(_misfit(operation, hardness))
    # A grouped convolution's output channel sees the inputs of its own group only.
    outputs_per_group = parameter.size(0) // operation.groups
    per_group = hardness.reshape(operation.groups, -1)
    return per_group.repeat_interleave(outputs_per_group, dim=0).reshape(
        parameter.size(0), parameter.size(1), *[1] * (parameter.dim() - 2)
    )


def _laid(operation: AffineOperation, parameter: Tensor, hardness: Tensor, axis: int) -> Tensor:
    if not operation.is_direct or axis < 0 or parameter.size(axis) != hardness.numel():
        raise NotFoldableError(_misfit(operation, hardness))
    shape = [1] * parameter.dim()
    shape[axis] = hardness.numel()
    return hardness.reshape(torch.Size(shape))


def _misfit(operation: AffineOperation, hardness: Tensor) -> str:
    return f"its {hardness.numel()} λ are not those of the channels of {describe(operation.node)}"
