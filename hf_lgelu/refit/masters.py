"""The parameters that steps are taken on, in float32 at the least."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_lgelu.refit.moments import widened


class Masters:
    """Parameters of a model, and of those in half precision a float32 copy, which they follow rounded.

    A step of a thousandth of a weight is less than bfloat16 can tell: taken on the weight itself it would be lost.

    Args:
        parameters: that the model runs with, each of which needs a gradient.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.values = [
            parameter if widened(parameter) is parameter else widened(parameter.detach()).requires_grad_(True)
            for parameter in self.parameters
        ]
        """What an optimizer steps on: the parameters themselves, or their copies."""

    def rounded(self) -> list[Tensor]:
        """Copies of the parameters as the model runs with them."""
        return [parameter.detach().clone() for parameter in self.parameters]

    def of(self, parameter: Tensor) -> Tensor:
        """What is stepped on in the place of a parameter."""
        return next(value for own, value in zip(self.parameters, self.values, strict=True) if own is parameter)

    def take_gradients(self) -> None:
        """Give the copies their parameters' gradients, and forget them there."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            if value is not parameter:
                value.grad = None if parameter.grad is None else widened(parameter.grad)
                parameter.grad = None

    @torch.no_grad()
    def write(self) -> None:
        """Round the copies into their parameters."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            if value is not parameter:
                parameter.copy_(value)

    @torch.no_grad()
    def put(self, values: Sequence[Tensor]) -> None:
        """Set what is stepped on, and the parameters with it."""
        for own, value in zip(self.values, values, strict=True):
            own.copy_(value)
        self.write()
