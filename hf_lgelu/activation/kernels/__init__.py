"""The table of kernels, one row per implementation of the λ-gates, and the calls that run a gate by a chosen kernel."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.hardness import effective_hardness
from hf_lgelu.activation.kernels import aten, cpu, plain

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """One implementation of (x, λ, gate) → x·G(λx), with first derivatives in x and λ.

    Functions may rely on checked arguments: floating dtypes, one λ that broadcasts to x, a key of GATES.

    Attributes:
        name: key in KERNELS.
        description: one line for a user.
        function: (x, λ, gate) → x·G(λx).
        refusal: (x, λ, gate) → the reason why `function` cannot take this input here and now, or None.
        learned: (x, s, t, override, gate) → x·G(λx) with λ = `effective_hardness(s, t, override)` formed inside,
            differentiable in x and s; None where this would save nothing.
        unavailable: () → the reason why this machine can run no input at all, or None.
    """

    name: str
    description: str
    function: Callable[[Tensor, Tensor, str], Tensor]
    refusal: Callable[[Tensor, Tensor, str], str | None]
    learned: Callable[[Tensor, Tensor, Tensor, Tensor, str], Tensor] | None = None
    unavailable: Callable[[], str | None] = lambda: None


def _triton_unavailable() -> str | None:
    if not torch.cuda.is_available():
        return "it runs on CUDA and ROCm devices, and torch sees none here"
    return _triton_refusal(*torch.ones(2, 1, device="cuda"))


def _triton_refusal(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> str | None:
    if not x.is_cuda:
        return f"it runs on CUDA and ROCm devices, x is on {x.device}"
    try:  # only if a device is there: other machines need no Triton
        from hf_lgelu.activation.kernels import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}); pip install triton (torch for CUDA on Linux brings it along)"
    return triton.input_refusal(x, hardness, gate) or triton.device_failure(x.device.index)


def _triton(x: Tensor, *rest: Any) -> Tensor:
    from hf_lgelu.activation.kernels import triton

    return triton.lambda_gate(x, *rest) if len(rest) == 2 else triton.learned_lambda_gate(x, *rest)


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "cpu",
            "one fused C++ pass each way, compiled on first use; float32 and bfloat16 on the CPU; saves only x",
            cpu.lambda_gate,
            cpu.refusal,
            learned=cpu.learned_lambda_gate,
            unavailable=cpu.unavailable,
        ),
        Kernel(
            "triton",
            "one fused Triton pass each way on CUDA and ROCm devices; saves only x",
            _triton,
            _triton_refusal,
            learned=_triton,
            unavailable=_triton_unavailable,
        ),
        Kernel(
            "traced",
            "hand-written derivatives on operations that torch.compile fuses into one pass each way; saves only x",
            plain.traced_lambda_gate,
            plain.traced_refusal,
        ),
        Kernel(
            "aten",
            "hand-written derivatives on torch operations, any device; saves only x",
            aten.lambda_gate,
            aten.refusal,
        ),
        Kernel(
            "eager",
            "plain operations: the reference, and what an exported graph consists of",
            plain.lambda_gate,
            lambda *_: None,
        ),
    )
}
"""In order of preference: unless the user chooses, the first kernel that does not refuse is taken."""

KERNEL_VARIABLE = "LGELU_KERNEL"  # environment variable with the kernel to use, read once, when this module is imported


def check_kernel(name: str | None, origin: str = "kernel") -> str | None:
    """`name`. Raises ValueError if it is no row of KERNELS; None stands for the automatic choice."""
    if name is not None and name not in KERNELS:
        raise ValueError(
            f"{origin} must be one of {', '.join(KERNELS)}, or unset for the automatic choice, got {name!r}"
        )
    return name


# One name for the whole process, not for a thread: threads of backward and of DataParallel would not see a thread's
# name, and torch.compile guards on a plain global.
_chosen: str | None = check_kernel(
    os.environ.get(KERNEL_VARIABLE) or None, f"the environment variable {KERNEL_VARIABLE}"
)


def chosen_kernel() -> str | None:
    """The name of the kernel from `use_kernel` or the environment; None if the choice is automatic."""
    return _chosen


@contextmanager
def use_kernel(name: str | None) -> Iterator[None]:
    """A block in which the named kernel computes the λ-gates, in the whole process; None is the automatic choice.

    >>> import torch, hf_lgelu
    >>> from hf_lgelu.activation.kernels import use_kernel
    >>> with use_kernel("aten"):
    ...     hf_lgelu.lambda_gelu(torch.tensor([0.0, 4.0]), 160.0)
    tensor([0., 4.])

    A kernel that cannot take an input then raises, while the automatic choice would take another kernel.
    `use_kernel` overrides the environment variable LGELU_KERNEL; the argument `kernel` of `lambda_gelu` overrides both.

    Raises ValueError for a name that is no row of KERNELS.
    """
    global _chosen
    outer, _chosen = _chosen, check_kernel(name)
    try:
        yield
    finally:
        _chosen = outer


def choose_kernel(x: Tensor, hardness: Tensor, name: str | None = None, gate: str = DEFAULT_GATE) -> Kernel:
    """The kernel `name`, else the user's choice, else the first row of KERNELS that takes the input and the gate.

    Raises RuntimeError where the named kernel cannot take this input; the message says why.
    """
    name = _chosen if name is None else check_kernel(name)
    if name is None:
        # eager, the last, refuses nothing
        return next(kernel for kernel in KERNELS.values() if kernel.refusal(x, hardness, gate) is None)
    kernel = KERNELS[name]
    if (reason := kernel.refusal(x, hardness, gate)) is not None:
        raise RuntimeError(f"the kernel {name!r} was asked for and cannot be used here: {reason}")
    return kernel


def kernel_report() -> str:
    """A short table to print: the λ-GELU kernels that can run here, and the kernel taken for each device and dtype.

    It builds the C++ kernel if necessary. The answer is for one λ per layer and a dense input;
    an input that a kernel refuses goes to the next.
    """
    choice = "automatic" if _chosen is None else f"{_chosen} (use_kernel or {KERNEL_VARIABLE})"
    lines = [f"λ-GELU kernels, choice: {choice}"]
    for name, kernel in KERNELS.items():
        reason = kernel.unavailable()
        lines.append(f"  {name:<8}{kernel.description}; {'ready' if reason is None else f'not here: {reason}'}")
    lines.append("taken for")
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for dtype in DTYPES:
            try:
                taken = choose_kernel(torch.zeros(1, dtype=dtype, device=device), torch.ones(1, device=device)).name
            except RuntimeError as error:
                taken = f"an error: {error}"
            lines.append(f"  {device} {str(dtype).removeprefix('torch.'):<10}{taken}")
    return "\n".join(lines)


def apply_gate(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE, kernel: str | None = None) -> Tensor:
    """`lambda_gate` for a hardness whose values are known to be right; checks dtype, shape and device only."""
    check_dense(x)
    _check_device(x, hardness)
    if hardness.dim() > x.dim():  # a layer's λ has shape (1,), also where torch.func.vmap hands over single elements
        hardness = hardness.reshape(())
    return choose_kernel(x, hardness, kernel, gate).function(x, hardness, gate)


def apply_learned_gate(
    x: Tensor, raw_hardness: Tensor, temperature: Tensor, override: Tensor, gate: str = DEFAULT_GATE
) -> Tensor:
    """`apply_gate` at λ = `effective_hardness(raw_hardness, temperature, override)`.

    A kernel that forms λ itself saves the small operations on s and their derivatives.
    """
    check_dense(x)
    _check_device(x, raw_hardness)
    kernel = choose_kernel(x, raw_hardness, None, gate)
    if kernel.learned is not None and raw_hardness.dim() <= x.dim():
        return kernel.learned(x, raw_hardness, temperature, override, gate)
    return apply_gate(x, effective_hardness(raw_hardness, temperature, override), gate)


def check_dense(value: Any, name: str = "x") -> Tensor:
    """The value. Raises TypeError if it is no dense tensor of one of DTYPES."""
    if isinstance(value, Tensor) and value.dtype in DTYPES and value.layout is torch.strided:
        return value
    given = f"a {value.layout} tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(f"{name} must be a dense float64, float32, float16 or bfloat16 tensor, got {given}")


def _check_device(x: Tensor, hardness: Tensor) -> None:
    # A λ without dimensions may come from the CPU, as in torch's own arithmetic.
    if x.device != hardness.device and hardness.dim() > 0:
        raise ValueError(f"x is on {x.device} and the hardness on {hardness.device}; move one of them, e.g. by .to()")
