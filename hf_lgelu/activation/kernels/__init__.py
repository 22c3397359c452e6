"""The table of λ-GELU backends: one row per implementation of the same function."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lgelu.activation.kernels import aten, eager


@dataclass(frozen=True)
class Kernel:
    """One implementation of (x, λ) → x·Φ(λx), with first derivatives in both.

    `supports` says whether it can take this input now; `function` may rely on checked arguments.
    """

    name: str
    description: str
    function: Callable[[Tensor, Tensor], Tensor]
    supports: Callable[[Tensor, Tensor], bool]


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "aten",
            "hand-written derivatives on torch operations; saves only x",
            aten.lambda_gelu,
            # A compiler fuses plain operations, and cannot look into hand-written derivatives as well.
            supports=lambda x, hardness: not torch.compiler.is_compiling(),
        ),
        Kernel(
            "eager",
            "plain operations: the reference, and what torch.compile fuses",
            eager.lambda_gelu,
            supports=lambda x, hardness: True,
        ),
    )
}
"""In order of preference: the first that supports the input is taken."""


def choose_kernel(x: Tensor, hardness: Tensor) -> Kernel:
    """The first row of KERNELS that supports this input."""
    return next(kernel for kernel in KERNELS.values() if kernel.supports(x, hardness))
