"""What one implementation of the λ-gates offers."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Kernel:
    """One implementation of (x, λ, gate) → x·G(λx), with first derivatives in x and λ.

    Functions may rely on checked arguments: floating dtypes, a λ that broadcasts to x, a key of GATES.

    Attributes:
        name: key in KERNELS.
        description: one line for a user.
        function: (x, λ, gate) → x·G(λx).
        refusal: (x, λ, gate) → why `function` cannot take this input here and now; None if it can.
        learned: (x, s, t, override, gate) → x·G(λx) with λ = `effective_hardness(s, t, override)` formed inside,
            differentiable in x and s, for an s of one element; None where that would save nothing.
        unavailable: () → why no input at all can be taken on this machine; None if some can.
    """

    name: str
    description: str
    function: Callable[[Tensor, Tensor, str], Tensor]
    refusal: Callable[[Tensor, Tensor, str], str | None]
    learned: Callable[[Tensor, Tensor, Tensor, Tensor, str], Tensor] | None = None
    unavailable: Callable[[], str | None] = lambda: None
