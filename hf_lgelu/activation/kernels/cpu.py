"""The λ-gates in C++ for the CPU: one fused, vectorized pass forward and one backward.

`gate.cpp` is compiled for a gate on its first use, in a second or two, by the compiler at hand, and kept in the user's
cache (`cpu_build`); nothing is built at install time. Without a compiler the automatic choice goes on to "aten".

From top to bottom: the library in the process, and the autograd function, which saves only x and the hardness.
"""

import ctypes
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.kernels import aten
from hf_lgelu.activation.kernels.cpu_build import build_library
from hf_lgelu.activation.kernels.plain import is_visible_backward, laid_as, opaque_refusal

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
GATES = ("lambda_gelu", "lambda_gelu_tanh", "lambda_silu")  # the structs of formulas.h

# With fewer elements, waking other threads costs more than they save. torch's own kernels have this limit.
_ALONE = 32768


Functions = dict[tuple[str, torch.dtype], Callable[..., None]]
"""{("forward" or "backward", dtype of x): function of the compiled kernel}.

Forward takes (count, x, λ, y, threads), with the number of elements of x. Backward takes (count, x, δ, λ, dx, sum,
threads), with None for a result that is not needed."""


@functools.cache
def load_library(gate: str) -> Functions | str:
    """The compiled kernel of a gate, built on the process's first call, or the reason why there is none, logged."""
    path = None
    try:
        path = build_library(gate)
        return _functions(ctypes.CDLL(str(path)))
    except RuntimeError as error:
        reason = str(error)
    except (OSError, AttributeError) as error:
        reason = f"the compiled kernel cannot be loaded; delete {path} to build it anew ({error})"
    logger.warning(
        "λ-gates run on torch's own operations, which are slower: their C++ kernel is not to be had: %s",
        reason.splitlines()[0],
    )
    return reason


def _functions(library: ctypes.CDLL) -> Functions:
    functions = Functions()
    memory, number = ctypes.c_void_p, ctypes.c_float
    for name, arguments in (
        ("forward", (memory, number, memory)),
        ("backward", (memory, memory, number, memory, memory)),
    ):
        for dtype, suffix in DTYPES.items():
            function = functions[name, dtype] = getattr(library, f"lambda_gate_{name}_{suffix}")
            function.argtypes, function.restype = (ctypes.c_int64, *arguments, ctypes.c_int), None
    return functions


def _loaded(gate: str) -> Functions:
    library = load_library(gate)
    if isinstance(library, str):  # as where nobody has asked for a refusal
        raise RuntimeError(f"the kernel 'cpu' cannot be used here: {library}")
    return library


def _threads(x: Tensor) -> int:
    # One thread or all, as in torch: OpenMP ends the threads that a smaller team leaves out, and must start them again.
    return torch.get_num_threads() if x.numel() > _ALONE else 1


def unavailable(gate: str = DEFAULT_GATE) -> str | None:
    """The reason why this kernel cannot run on this machine, or None. Builds the kernel if necessary."""
    library = load_library(gate)
    return library if isinstance(library, str) else None


def refusal(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> str | None:
    """The reason why the compiled kernel cannot take this input, or None."""
    if gate not in GATES:
        return f"it has no formula for {gate}"
    if not (x.is_cpu and hardness.is_cpu):
        return f"it runs on the CPU, x is on {x.device} and the hardness on {hardness.device}"
    if x.dtype not in DTYPES:
        return f"it takes float32 and bfloat16, x is {x.dtype}"
    if (reason := opaque_refusal(x, hardness)) is not None:
        return reason
    return unavailable(gate)


def lambda_gate(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> Tensor:
    """x·G(λx) in one pass; saves x and λ."""
    return _LambdaGate.apply(x, hardness, None, None, gate)


def learned_lambda_gate(
    x: Tensor, raw_hardness: Tensor, temperature: Tensor, override: Tensor, gate: str = DEFAULT_GATE
) -> Tensor:
    """x·G(λx) with one λ formed from s, t and the override in double precision; saves x and s."""
    return _LambdaGate.apply(x, raw_hardness, temperature, override, gate)


class _LambdaGate(torch.autograd.Function):
    """The gate, differentiable in x and in the hardness: λ itself, or s if t and the override are given."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, hardness: Tensor, temperature: Tensor | None, override: Tensor | None, gate: str
    ) -> Tensor:
        ctx.save_for_backward(x, hardness)
        ctx.gate = gate
        ctx.state, ctx.rate = None, 1.0
        value = hardness.item()
        if temperature is not None and override is not None:
            # As numbers: hardening may write to the override before the backward pass.
            ctx.state = temperature.item(), override.item()
            value, ctx.rate = _learned(value, *ctx.state)
        # In float32, with one NaN for all kinds of NaN: formulas.h rounds to bfloat16 without a check.
        ctx.value = ctypes.c_float(math.nan if value != value else value).value
        y = torch.empty_like(x)  # in the layout that torch's own activations give it
        if x.numel():
            x = laid_as(y, x)
            _loaded(gate)["forward", x.dtype](x.numel(), x.data_ptr(), ctx.value, y.data_ptr(), _threads(x))
        return y

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, hardness = ctx.saved_tensors
        needs_x, needs_hardness = ctx.needs_input_grad[:2]
        if is_visible_backward(x, delta):
            rest = (None, None) if ctx.state is None else (torch.full_like(hardness, number) for number in ctx.state)
            state = (hardness, *rest)
            return *aten.learned_gradients(x, state, delta, needs_x, needs_hardness, ctx.gate), None, None, None
        total = ctypes.c_double() if needs_hardness and ctx.rate != 0 else None
        grad_x = torch.empty_like(x)
        if x.numel() and (needs_x or total is not None):
            x, delta = laid_as(grad_x, x), laid_as(grad_x, delta)
            _loaded(ctx.gate)["backward", x.dtype](
                *(x.numel(), x.data_ptr(), delta.data_ptr(), ctx.value),
                grad_x.data_ptr() if needs_x else None,
                None if total is None else ctypes.addressof(total),
                _threads(x),
            )
        grad_hardness = None
        if needs_hardness:
            # 1/λ² after the sum: no partial product can overflow.
            gradient = 0.0 if total is None else ctx.rate * total.value / ctx.value**2
            grad_hardness = torch.full_like(hardness, gradient)
        return grad_x if needs_x else None, grad_hardness, None, None, None


def _learned(raw_hardness: float, temperature: float, override: float) -> tuple[float, float]:
    """λ and ∂λ/∂s."""
    if override >= 1:
        return override, 0.0
    if temperature == 0:  # a state that was never filled
        return math.nan, math.nan
    z = raw_hardness / temperature
    if z > 40:  # softplus is the identity to the last bit
        return 1 + z, 1 / temperature
    power = math.exp(z)
    return 1 + math.log1p(power), power / (1 + power) / temperature
