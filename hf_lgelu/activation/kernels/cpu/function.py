"""The λ-gates through the compiled kernel, which `build` compiles.

From top to bottom: its library in the process, the two passes over tensors of any strides, and the autograd function,
which saves only x and the hardness.
"""

import ctypes
import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.kernels import aten
from hf_lgelu.activation.kernels.cpu.build import build_library
from hf_lgelu.activation.kernels.plain import is_visible_backward, opaque_refusal

logger = logging.getLogger(__name__)

MAX_AXES = 8
_MAX_OPERANDS = 4
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
GATES = ("lambda_gelu", "lambda_gelu_tanh", "lambda_silu")
"""The structs of formulas.h."""

# With fewer elements, waking the other threads costs more than they save; the limit of torch's own kernels.
_ALONE = 32768

# Of the innermost loop under several λ: in shorter ones, such as three channels that lie last, the steps between
# them cost more than the function.
_SHORTEST_RUN = 8


class LoopsArgument(ctypes.Structure):
    """Nested loops over the elements of several operands of one shape, as the C++ side reads them."""

    _fields_ = (
        ("axes", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * MAX_AXES),
        ("strides", (ctypes.c_int64 * MAX_AXES) * _MAX_OPERANDS),
    )

    @classmethod
    def of(cls, sizes: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> "LoopsArgument":
        """Of the sizes of the loops, the innermost last, and each operand's steps per loop in elements."""
        argument = cls(axes=len(sizes))
        argument.sizes[: len(sizes)] = sizes
        for row, steps in zip(argument.strides, strides, strict=False):
            row[: len(steps)] = steps
        return argument


_pointer, _loops = ctypes.c_void_p, ctypes.POINTER(LoopsArgument)


@dataclass(frozen=True)
class Library:
    """The functions of the compiled kernel, by the dtype of x.

    Attributes:
        path: the shared library.
        forward: (loops over x, λ, y; x, λ, y; threads).
        backward: (loops over x, δ, λ, dx; the axis along which λ varies or -1; x, δ, λ, dx, sums; threads),
            with dx or the sums 0 where they are not wanted.
    """

    path: Path
    forward: dict[torch.dtype, Callable[..., None]]
    backward: dict[torch.dtype, Callable[..., None]]

    @classmethod
    def load(cls, path: Path) -> "Library":
        """Raises RuntimeError where the file is no library of this kernel."""
        try:
            library = ctypes.CDLL(str(path))

            def functions(name: str, *arguments: type) -> dict[torch.dtype, Callable[..., None]]:
                found = {dtype: getattr(library, f"lambda_gate_{name}_{suffix}") for dtype, suffix in DTYPES.items()}
                for function in found.values():
                    function.argtypes, function.restype = (*arguments, ctypes.c_int), None
                return found

            forward = functions("forward", _loops, *(_pointer,) * 3)
            return cls(path, forward, functions("backward", _loops, ctypes.c_int64, *(_pointer,) * 5))
        except (OSError, AttributeError) as error:
            raise RuntimeError(
                f"the compiled kernel cannot be loaded; delete {path} to build it anew ({error})"
            ) from error


@functools.cache
def load_library(gate: str) -> Library | str:
    """The compiled kernel of a gate, built on the first call of the process; or why there is none, which is logged."""
    try:
        return Library.load(build_library(gate))
    except RuntimeError as error:
        logger.warning(
            "λ-gates run on torch's own operations, which are slower: their C++ kernel is not to be had: %s",
            str(error).splitlines()[0],
        )
        return str(error)


class One:
    """A single λ, and its gradient: Python's and C's numbers, which cost less than tensors of one element."""

    def __init__(self, hardness: float) -> None:
        # One NaN for all kinds of them: formulas.h rounds to bfloat16 without looking.
        self._hardness = ctypes.c_float(math.nan if hardness != hardness else hardness)
        self.address = ctypes.addressof(self._hardness)

    def strides(self, shape: torch.Size) -> tuple[int, ...]:
        """λ's strides over x's shape."""
        return (0,) * len(shape)

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

    def strides(self, shape: torch.Size) -> tuple[int, ...]:
        """λ's strides over x's shape."""
        return _broadcast_strides(self._hardness, shape)

    def new_sums(self) -> ctypes.Array:
        """Room for Σ δ·u²g(u) of each λ."""
        return (ctypes.c_double * self._hardness.numel())()

    def gradient(self, sums: ctypes.Array, rate: float, hardness: Tensor) -> Tensor:
        """`rate` times ∂λ, as a tensor like `hardness`."""
        if hardness.numel() == 0:  # of which torch makes no tensor
            return torch.zeros_like(hardness)
        total = torch.frombuffer(sums, dtype=torch.float64).reshape(hardness.shape)
        return (rate * total / self._hardness.double().square()).to(hardness.dtype)


def can_walk(x: Tensor, hardness: Tensor) -> bool:
    """Whether several λ vary along one axis of x's memory at most, neighbouring axes taken as one, in no short runs."""
    if x.numel() == 0:
        return True
    dense = torch.empty_like(x, device="meta").stride()
    plan = _plan(x.shape, (dense, _broadcast_strides(hardness.detach().contiguous(), x.shape), dense), 1)
    return plan is not None and plan.loops.sizes[plan.loops.axes - 1] >= _SHORTEST_RUN


def forward_pass(x: Tensor, hardness: One | Several, gate: str) -> Tensor:
    """x·G(λx), in the layout that torch's own activations give it."""
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    if isinstance(hardness, One) and x.is_contiguous():
        plan = _flat_plan(x.numel(), 3, 1)
    else:
        found = _plan(x.shape, (x.stride(), hardness.strides(x.shape), y.stride()), 1)
        if found is None:
            return forward_pass(y.copy_(x), hardness, gate)
        plan = found
    _loaded(gate).forward[x.dtype](plan.loops, x.data_ptr(), hardness.address, y.data_ptr(), _threads(x))
    return y


def backward_pass(
    x: Tensor,
    delta: Tensor,
    hardness: One | Several,
    gate: str,
    needs_x: bool,
    sums: ctypes.c_double | ctypes.Array | None,
) -> Tensor | None:
    """∂x if it is needed; Σ δ·u²g(u) per λ is written to `sums` if they are given."""
    grad_x = torch.empty_like(x) if needs_x else None
    if x.numel() == 0 or (grad_x is None and sums is None):
        return grad_x
    if isinstance(hardness, One) and x.is_contiguous() and delta.is_contiguous():
        plan = _flat_plan(x.numel(), 4, 2)
    else:
        out_strides = x.stride() if grad_x is None else grad_x.stride()
        found = _plan(x.shape, (x.stride(), delta.stride(), hardness.strides(x.shape), out_strides), 2)
        if found is None:
            # δ, or x too, lies in an order in which λ changes along several axes: bring both into the result's.
            dense_x = torch.empty_like(x).copy_(x)
            return backward_pass(dense_x, torch.empty_like(dense_x).copy_(delta), hardness, gate, needs_x, sums)
        plan = found
    _loaded(gate).backward[x.dtype](
        *(plan.loops, plan.hardness_axis, x.data_ptr(), delta.data_ptr(), hardness.address),
        None if grad_x is None else grad_x.data_ptr(),
        None if sums is None else ctypes.addressof(sums),
        _threads(x),
    )
    return grad_x


@dataclass(frozen=True)
class _Plan:
    """How one call walks over its operands."""

    loops: LoopsArgument
    hardness_axis: int  # of the loops; -1 where one λ serves all


@functools.lru_cache(maxsize=4096)
def _plan(shape: torch.Size, strides: tuple[tuple[int, ...], ...], hardness: int) -> _Plan | None:
    """None where the operands cannot be walked over together; `hardness` is the position of λ among them."""
    sizes, steps = _merged_loops(shape, strides)
    axes = [axis for axis, step in enumerate(steps[hardness]) if step != 0]  # along which λ varies
    if len(sizes) > MAX_AXES or len(axes) > 1:
        return None
    return _Plan(LoopsArgument.of(sizes, steps), axes[0] if axes else -1)


def _merged_loops(
    shape: torch.Size, strides: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Loops over operands of `shape` with `strides`: (their sizes, the innermost last; the steps of each operand).

    They are as few as the strides allow, in the memory order of the first operand. Axes of size 1 vanish, and
    neighbours merge where every operand steps through both as through one.
    """
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    # Stable, so that axes along which the first operand is broadcast keep their order.
    axes.sort(key=lambda axis: -abs(strides[0][axis]))
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis in axes:
        if sizes and all(s[-1] == stride[axis] * shape[axis] for s, stride in zip(steps, strides, strict=True)):
            sizes[-1] *= shape[axis]
            for s, stride in zip(steps, strides, strict=True):
                s[-1] = stride[axis]
        else:
            sizes.append(shape[axis])
            for s, stride in zip(steps, strides, strict=True):
                s.append(stride[axis])
    if not sizes:
        return (1,), tuple((0,) for _ in strides)
    return tuple(sizes), tuple(tuple(s) for s in steps)


def _broadcast_strides(tensor: Tensor, shape: torch.Size) -> tuple[int, ...]:
    """The strides of `tensor` expanded to `shape`."""
    if tensor.numel() == 1:
        return (0,) * len(shape)
    missing = len(shape) - tensor.dim()
    return (0,) * missing + tuple(
        0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


@functools.lru_cache(maxsize=1024)
def _flat_plan(size: int, operands: int, hardness: int) -> _Plan:
    """For contiguous operands and one λ."""
    strides = tuple((0,) if position == hardness else (1,) for position in range(operands))
    return _Plan(LoopsArgument.of((size,), strides), -1)


def _loaded(gate: str) -> Library:
    library = load_library(gate)
    if isinstance(library, str):  # as after a refusal that was not asked for
        raise RuntimeError(f"the kernel 'cpu' cannot be used here: {library}")
    return library


def _threads(x: Tensor) -> int:
    # One or all, as in torch: OpenMP ends threads that a smaller team leaves out, and has to start them again.
    return torch.get_num_threads() if x.numel() > _ALONE else 1


def unavailable(gate: str = DEFAULT_GATE) -> str | None:
    """Why this kernel cannot run on this machine, or None. Builds it if need be."""
    library = load_library(gate)
    return library if isinstance(library, str) else None


def refusal(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> str | None:
    """Why the compiled kernel cannot take this input, or None."""
    if gate not in GATES:
        return f"it has no formula for {gate}"
    if not (x.is_cpu and hardness.is_cpu):
        return f"it runs on the CPU, x is on {x.device} and the hardness on {hardness.device}"
    if x.dtype not in DTYPES:
        return f"it takes float32 and bfloat16, x is {x.dtype}"
    if (reason := opaque_refusal(x, hardness)) is not None:
        return reason
    if hardness.numel() != 1 and not can_walk(x, hardness):
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
    """Differentiable in x and in the hardness: λ itself, or s where t and the override are given."""

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
        return forward_pass(x, ctx.used, gate)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, hardness = ctx.saved_tensors
        needs_x, needs_hardness = ctx.needs_input_grad[:2]
        grad_x, grad_hardness = _gradients(ctx, x, hardness, delta, needs_x, needs_hardness)
        return grad_x, grad_hardness, None, None, None


def _gradients(
    ctx: Any, x: Tensor, hardness: Tensor, delta: Tensor, needs_x: bool, needs_hardness: bool
) -> tuple[Tensor | None, Tensor | None]:
    if is_visible_backward(x, delta):
        rest = (None, None) if ctx.state is None else (torch.full_like(hardness, number) for number in ctx.state)
        return aten.learned_gradients(x, (hardness, *rest), delta, needs_x, needs_hardness, ctx.gate)
    sums = ctx.used.new_sums() if needs_hardness and ctx.rate != 0 else None
    grad_x = backward_pass(x, delta, ctx.used, ctx.gate, needs_x, sums)
    if not needs_hardness:
        return grad_x, None
    return grad_x, torch.zeros_like(hardness) if sums is None else ctx.used.gradient(sums, ctx.rate, hardness)


def _learned(raw_hardness: float, temperature: float, override: float) -> tuple[float, float]:
    """λ and ∂λ/∂s."""
    if override >= 1:
        return override, 0.0
    if temperature == 0:  # of a state that was never filled
        return math.nan, math.nan
    z = raw_hardness / temperature
    if z > 40:  # softplus is the identity to the last bit
        return 1 + z, 1 / temperature
    power = math.exp(z)
    return 1 + math.log1p(power), power / (1 + power) / temperature
