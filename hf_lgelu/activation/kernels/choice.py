"""Which kernel runs: the first of KERNELS that takes the input, or the one that the user names."""

import os
from types import TracebackType

from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.kernels import KERNELS
from hf_lgelu.activation.kernels.kernel import Kernel

KERNEL_VARIABLE = "LGELU_KERNEL"
"""Environment variable with the kernel to use, read once, when this module is imported."""


def check_kernel(name: str | None, origin: str = "kernel") -> str | None:
    """Return `name`, or raise if it is no row of KERNELS; None stands for the automatic choice."""
    if name is not None and name not in KERNELS:
        raise ValueError(
            f"{origin} must be one of {', '.join(KERNELS)}, or unset for the automatic choice, got {name!r}"
        )
    return name


# One name for the whole process, not for a thread: backward threads and DataParallel's would not see it, and
# torch.compile guards on a plain global.
_chosen: str | None = check_kernel(
    os.environ.get(KERNEL_VARIABLE) or None, f"the environment variable {KERNEL_VARIABLE}"
)


def chosen_kernel() -> str | None:
    """The kernel that `use_kernel` or the environment names; None if the choice is automatic."""
    return _chosen


class use_kernel:  # noqa: N801 -- a context manager, named like torch.no_grad
    """Within it, the λ-gates are computed by the named kernel, in the whole process; None is the automatic choice.

    >>> import torch, hf_lgelu
    >>> with hf_lgelu.use_kernel("aten"):
    ...     hf_lgelu.lambda_gelu(torch.tensor([0.0, 4.0]), 160.0)
    tensor([0., 4.])

    A kernel that cannot take an input then raises, where the automatic choice would take another.
    It wins over the environment variable LGELU_KERNEL; the argument `kernel` of `lambda_gelu` wins over it.

    Args:
        name: a row of KERNELS, or None.

    Raises:
        ValueError: there is no such kernel.
    """

    def __init__(self, name: str | None) -> None:
        self.name = check_kernel(name)
        self._outer: list[str | None] = []

    def __enter__(self) -> None:
        global _chosen
        self._outer.append(_chosen)
        _chosen = self.name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _chosen
        _chosen = self._outer.pop()


def choose_kernel(x: Tensor, hardness: Tensor, name: str | None = None, gate: str = DEFAULT_GATE) -> Kernel:
    """The kernel `name`, else the one that the user chose, else the first row of KERNELS that takes input and gate.

    Raises:
        ValueError: there is no kernel `name`.
        RuntimeError: the named kernel cannot take this input; the message says why.
    """
    name = _chosen if name is None else check_kernel(name)
    if name is None:
        # eager, the last, refuses nothing
        return next(kernel for kernel in KERNELS.values() if kernel.refusal(x, hardness, gate) is None)
    kernel = KERNELS[name]
    if (reason := kernel.refusal(x, hardness, gate)) is not None:
        raise RuntimeError(f"the kernel {name!r} was asked for and cannot be used here: {reason}")
    return kernel
