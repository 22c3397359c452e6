"""What one implementation of λ-GELU offers."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Kernel:
    """One implementation of (x, λ) → x·Φ(λx), with first derivatives in both.

    Functions may rely on checked arguments: floating dtypes, and a λ that broadcasts to x.

    Attributes:
        name: key in KERNELS.
        description: one line for a user.
        function: (x, λ) → x·Φ(λx).
        refusal: (x, λ) → why `function` cannot take this input here and now; None if it can.
        learned: (x, s, t, override) → x·Φ(λx) with λ = `effective_hardness(s, t, override)` formed inside,
            differentiable in x and s, for an s of one element; None where that would save nothing.
        unavailable: () → why no input at all can be taken on this machine; None if some can.
    """

    name: str
    description: str
    function: Callable[[Tensor, Tensor], Tensor]
    refusal: Callable[[Tensor, Tensor], str | None]
    learned: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    unavailable: Callable[[], str | None] = lambda: None
