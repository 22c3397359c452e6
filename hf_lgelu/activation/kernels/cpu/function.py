"""The λ-gates through the compiled kernel, which `build` compiles.

From top to bottom: its library in the process, how λ lies in it, and the autograd function, which saves only x and the
hardness.
"""

import ctypes
import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.kernels import aten
from hf_lgelu.activation.kernels.cpu.build import build_library
from hf_lgelu.activation.kernels.plain import is_visible_backward, laid_as, opaque_refusal

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
GATES = ("lambda_gelu", "lambda_gelu_tanh", "lambda_silu")  # the structs of formulas.h

# With fewer elements, waking other threads costs more than they save. torch's own kernels have this limit.
_ALONE = 32768

# The innermost loop with several λ: in shorter loops, such as three channels on the last axis, the steps between the
# loops cost more than the function.
_SHORTEST_RUN = 8


Functions = dict[tuple[str, torch.dtype], Callable[..., None]]
"""{("forward" or "backward", dtype of x): function of the compiled kernel}.

Forward takes (outer, count, inner; x, λ, y; threads): the sizes of x in the order of its memory, and λ varies along
`count`. Backward takes (outer, count, inner; x, δ, λ, dx, sums; threads), with None for a result that is not needed."""


Library = TypeVar("Library")


@functools.cache
def load_library(gate: str) -> Functions | str:
    """The compiled kernel of a gate, built on the process's first call, or the reason why there is none, logged."""
    return open_library(gate, None, _functions, "λ-gates run on torch's own operations, which are slower")


def _functions(library: ctypes.CDLL) -> Functions:
    functions = Functions()
    for name, pointers in (("forward", 3), ("backward", 5)):
        for dtype, suffix in DTYPES.items():
            function = functions[name, dtype] = getattr(library, f"lambda_gate_{name}_{suffix}")
            sizes, memory = (ctypes.c_int64,) * 3, (ctypes.c_void_p,) * pointers
            function.argtypes, function.restype = (*sizes, *memory, ctypes.c_int), None
    return functions


def open_library(name: str, source: Path | None, read: Callable[[ctypes.CDLL], Library], without: str) -> Library | str:
    """The result of `read` on a library of `build_library`, or the reason why there is none, logged after `without`."""
    path = None
    try:
        path = build_library(name, source)
        return read(ctypes.CDLL(str(path)))
    except RuntimeError as error:
        reason = str(error)
    except (OSError, AttributeError) as error:
        reason = f"the compiled kernel cannot be loaded; delete {path} to build it anew ({error})"
    logger.warning("%s: their C++ kernel is not to be had: %s", without, reason.splitlines()[0])
    return reason


class One:
    """A single λ, and its gradient: Python's and C's numbers, which cost less than tensors of one element."""

    def __init__(self, hardness: float) -> None:
        # One NaN for all kinds of NaN: formulas.h rounds to bfloat16 without a check.
        self._hardness = ctypes.c_float(math.nan if hardness != hardness else hardness)
        self.address = ctypes.addressof(self._hardness)

    def sizes(self, x: Tensor) -> tuple[int, int, int]:
        """How λ lies along the memory of x: (outer, count, inner)."""
        return 1, 1, x.numel()

    @staticmethod
    def new_sums() -> ctypes.c_double:
        """Room for Σ δ·u²g(u)."""
        return ctypes.c_double()

    def gradient(self, sums: ctypes.c_double, rate: float, hardness: Tensor) -> Tensor:
        """`rate` times ∂λ, as a tensor like `hardness`."""
        # 1/λ² after the sum: no partial product can overflow.
        return torch.full_like(hardness, rate * sums.value / self._hardness.value**2)


class Several:
    """A λ per channel or hidden unit, float32 and contiguous, and its gradient."""

    def __init__(self, hardness: Tensor) -> None:
        # One NaN, as above.
        self._hardness = hardness.nan_to_num(math.nan, math.inf, -math.inf)
        self.address = self._hardness.data_ptr()

    def sizes(self, x: Tensor) -> tuple[int, int, int]:
        """How λ lies along the memory of x: (outer, count, inner)."""
        sizes = _sizes_around(x.shape, x.stride(), self._hardness.shape)
        if sizes is None:
            raise RuntimeError(f"λ, {tuple(self._hardness.shape)}, changes along several axes of x, {tuple(x.shape)}")
        return sizes

    def new_sums(self) -> ctypes.Array:
        """Room for Σ δ·u²g(u) of each λ."""
        return (ctypes.c_double * self._hardness.numel())()

    def gradient(self, sums: ctypes.Array, rate: float, hardness: Tensor) -> Tensor:
        """`rate` times ∂λ, as a tensor like `hardness`."""
        if hardness.numel() == 0:  # torch makes no tensor from an empty buffer
            return torch.zeros_like(hardness)
        total = torch.frombuffer(sums, dtype=torch.float64).reshape(hardness.shape)
        return (rate * total / self._hardness.double().square()).to(hardness.dtype)


@functools.lru_cache(maxsize=4096)
def _sizes_around(shape: torch.Size, strides: tuple[int, ...], of_hardness: torch.Size) -> tuple[int, int, int] | None:
    """(outer, count, inner) of a tensor without gaps, where several λ vary along `count`; None if they do not."""
    order = sorted((axis for axis, size in enumerate(shape) if size != 1), key=lambda axis: -strides[axis])
    missing = len(shape) - len(of_hardness)
    along = [axis for axis in order if axis >= missing and of_hardness[axis - missing] != 1]
    first = order.index(along[0])
    if order[first : first + len(along)] != sorted(along):
        return None
    parts = order[:first], along, order[first + len(along) :]
    outer, count, inner = (math.prod(shape[axis] for axis in part) for part in parts)
    return outer, count, inner


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
    if hardness.numel() != 1 and x.numel():
        sizes = _sizes_around(x.shape, torch.empty_like(x, device="meta").stride(), hardness.shape)
        if sizes is None or (sizes[2] if sizes[2] > 1 else sizes[1]) < _SHORTEST_RUN:
            shapes = f"λ, {tuple(hardness.shape)}, changes in the memory of x, {tuple(x.shape)},"
            return f"{shapes} too often or along several axes"
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
        if hardness.numel() != 1:
            ctx.used = Several(hardness.detach().to(torch.float32).contiguous())
        elif temperature is None or override is None:
            ctx.used = One(hardness.item())
        else:
            # As numbers: hardening may write to the override before the backward pass.
            ctx.state = temperature.item(), override.item()
            value, ctx.rate = _learned(hardness.item(), *ctx.state)
            ctx.used = One(value)
        y = torch.empty_like(x)  # in the layout that torch's own activations give it
        if x.numel():
            x = laid_as(y, x)
            run = _loaded(gate)["forward", x.dtype]
            run(*ctx.used.sizes(x), x.data_ptr(), ctx.used.address, y.data_ptr(), _threads(x))
        return y

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, hardness = ctx.saved_tensors
        needs_x, needs_hardness = ctx.needs_input_grad[:2]
        if is_visible_backward(x, delta):
            rest = (None, None) if ctx.state is None else (torch.full_like(hardness, number) for number in ctx.state)
            state = (hardness, *rest)
            return *aten.learned_gradients(x, state, delta, needs_x, needs_hardness, ctx.gate), None, None, None
        sums = ctx.used.new_sums() if needs_hardness and ctx.rate != 0 else None
        grad_x = torch.empty_like(x)
        if x.numel() and (needs_x or sums is not None):
            x, delta = laid_as(grad_x, x), laid_as(grad_x, delta)
            _loaded(ctx.gate)["backward", x.dtype](
                *(*ctx.used.sizes(x), x.data_ptr(), delta.data_ptr(), ctx.used.address),
                grad_x.data_ptr() if needs_x else None,
                None if sums is None else ctypes.addressof(sums),
                _threads(x),
            )
        grad_hardness = None
        if needs_hardness:
            grad_hardness = torch.zeros_like(hardness) if sums is None else ctx.used.gradient(sums, ctx.rate, hardness)
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
