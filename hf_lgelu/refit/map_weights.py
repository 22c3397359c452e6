"""The weight of a map as a matrix, and a constant added to its outputs."""

import torch
from torch import Tensor, nn

from hf_lgelu.models.dataflow.affine_operations import AffineOperation


def oriented(model: nn.Module, operation: AffineOperation) -> Tensor:
    """A view of a map's weight as (outputs, inputs)."""
    weight = model.get_parameter(operation.weight).detach()
    return weight if operation.output_axis == 0 else weight.T


@torch.no_grad()
def add_constant(
    network: nn.Module, operation: AffineOperation, outputs: slice, values: Tensor, direction: Tensor | None
) -> None:
    """Add `values` to the outputs of a map, at the places `outputs`: to its bias, or as values · directionᵀ.

    Raises ValueError for a map without a bias where there is no direction either.
    """
    if operation.bias is not None:
        bias = network.get_parameter(operation.bias)
        bias[outputs] = (bias[outputs].double() + values.to(bias.device)).to(bias.dtype)
        return
    if direction is None:
        raise ValueError(f"{operation.weight_name} has no bias, and its inputs no constant direction")
    rows = oriented(network, operation)
    values, direction = values.to(rows.device), direction.to(rows.device)
    rows[outputs] = (rows[outputs].double() + torch.outer(values, direction)).to(rows.dtype)
