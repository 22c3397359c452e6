"""Adam on linear maps as functions of centred inputs.

A map is y = W(x - x̄) + b' with x̄ the mean of its inputs and b' = b + W·x̄. Steps on W then leave the mean output where
it is, however far from zero the features are; those of units that are always on lie at several times their spread, and
steps on plain W would mostly be steps on the constant.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WARMUP = 10
_LEAST_SIZE = 1e-3  # of a parameter that is zero, or nearly


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
        """`rate` is that of each parameter at the most, as a share of its mean absolute value."""
        self._rates = [rate * max(value.detach().abs().mean().item(), _LEAST_SIZE) for value in parameters]
        self._adam = torch.optim.Adam([{"params": [value]} for value in parameters], betas=(0.9, 0.95))
        self._maps = maps

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._adam.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """What steps have left behind, by names."""
        kept = self._adam.state_dict()["state"]
        return {f"{number}.{what}": value for number, one in kept.items() for what, value in one.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state` of the same parameters."""
        kept: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            number, _, what = name.partition(".")
            kept.setdefault(int(number), {})[what] = value
        self._adam.load_state_dict({**self._adam.state_dict(), "state": kept})

    @torch.no_grad()
    def step(self, done: int, progress: float) -> None:
        """The step behind so many others, after a share of the way."""
        share = min(1.0, (done + 1) / _WARMUP) * 0.5 * (1 + math.cos(math.pi * progress))
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        maps = [centred for centred in self._maps if centred.bias.grad is not None]  # no input reached the others
        before = [centred.weight.detach().clone() for centred in maps]
        for centred in maps:
            moved = torch.outer(centred.bias.grad, centred.mean)
            centred.weight.grad.sub_(moved.mT if centred.transposed else moved)
        self._adam.step()
        for centred, old in zip(maps, before, strict=True):
            centred.bias.sub_(centred.constant(centred.weight - old))
