"""The optimizer of "distill": Adam on maps with centred inputs, in float32 or wider.

A map is y = W(x - x̄) + b' with x̄ the mean of its inputs and b' = b + W·x̄. Steps on W then leave the mean output
unchanged, however far the features are from zero. Units that are always on have a mean of several times their spread;
a step on plain W would mostly change the constant.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lgelu.refit.moments import widened

_WARMUP = 10
_LEAST_SIZE = 1e-3  # assumed mean absolute value of a parameter that is (almost) zero


@dataclass(frozen=True)
class CentredMap:
    """A map's weight, (outputs, inputs) or `transposed`, its bias and the mean of its inputs."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    transposed: bool = False

    def constant(self, change: Tensor) -> Tensor:
        """W·x̄ for a change of the weight."""
        return (change.mT if self.transposed else change) @ self.mean


class CentredAdam:
    """Adam whose steps on a map's weight and bias are those on W and b'.

    The rates rise over the first steps, and fall to zero as a cosine.
    """

    def __init__(self, parameters: Sequence[Tensor], rate: float, maps: Sequence[CentredMap]) -> None:
        """`rate` is the highest learning rate of each parameter, as a share of the parameter's mean absolute value."""
        self._rates = [rate * max(value.detach().abs().mean().item(), _LEAST_SIZE) for value in parameters]
        self._adam = torch.optim.Adam([{"params": [value]} for value in parameters], betas=(0.9, 0.95))
        self._maps = maps

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._adam.zero_grad()

    @torch.no_grad()
    def step(self, done: int, progress: float) -> None:
        """Take a step: `done` is the number of steps before, `progress` the share of the descent that has passed."""
        share = min(1.0, (done + 1) / _WARMUP) * 0.5 * (1 + math.cos(math.pi * progress))
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        # A map without a gradient was reached by no input.
        maps = [centred for centred in self._maps if centred.bias.grad is not None]
        before = [centred.weight.detach().clone() for centred in maps]
        for centred in maps:
            moved = torch.outer(centred.bias.grad, centred.mean)
            centred.weight.grad.sub_(moved.mT if centred.transposed else moved)
        self._adam.step()
        for centred, old in zip(maps, before, strict=True):
            centred.bias.sub_(centred.constant(centred.weight - old))


class Masters:
    """Parameters of a model, with a float32 copy of each parameter in half precision.

    Steps are taken on the copies, which are then rounded into the parameters: a step of a thousandth of a weight is
    below the precision of bfloat16.

    Args:
        parameters: parameters of the model, each of which needs a gradient.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.values = [
            parameter if widened(parameter) is parameter else widened(parameter.detach()).requires_grad_(True)
            for parameter in self.parameters
        ]
        """The tensors that an optimizer moves: the parameters themselves, or their copies."""

    def rounded(self) -> list[Tensor]:
        """Copies of the parameters in the model's precision."""
        return [parameter.detach().clone() for parameter in self.parameters]

    def of(self, parameter: Tensor) -> Tensor:
        """The tensor that is moved in the place of a parameter."""
        return next(value for own, value in zip(self.parameters, self.values, strict=True) if own is parameter)

    def take_gradients(self) -> None:
        """Move the gradients from the parameters to their copies."""
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
