"""Activations that are functions, as modules."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn


class Called(nn.Module):
    """A module that computes what the call of a function does, with the other arguments of that call."""

    def __init__(self, function: Callable[..., Tensor], args: Sequence[Any] = (), kwargs: Any = None) -> None:
        super().__init__()
        self.function, self.args, self.kwargs = function, tuple(args), dict(kwargs or {})

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.args, **self.kwargs)

    def _get_name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)
