"""The two passes over memory: what the compiled functions are given for tensors of any strides."""

import ctypes
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lgelu.activation.kernels.cpu.library import MAX_AXES, Library, LoopsArgument, load_failure, load_library
from hf_lgelu.activation.kernels.layout import Loops, broadcast_strides, merged_loops, varying_axes

# With fewer elements, waking the other threads costs more than they save; the limit of torch's own kernels.
_ALONE = 32768

# Of the innermost loop under several λ: in shorter ones, such as three channels that lie last, the steps between
# them cost more than the function.
_SHORTEST_RUN = 8


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
        return broadcast_strides(self._hardness, shape)

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
    plan = _plan(x.shape, (dense, broadcast_strides(hardness.detach().contiguous(), x.shape), dense), 1)
    return plan is not None and plan.loops.sizes[plan.loops.axes - 1] >= _SHORTEST_RUN


def forward(x: Tensor, hardness: One | Several, gate: str) -> Tensor:
    """x·G(λx), in the layout that torch's own activations give it."""
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    if isinstance(hardness, One) and x.is_contiguous():
        plan = _flat_plan(x.numel(), 3, 1)
    else:
        found = _plan(x.shape, (x.stride(), hardness.strides(x.shape), y.stride()), 1)
        if found is None:
            return forward(y.copy_(x), hardness, gate)
        plan = found
    _loaded(gate).forward[x.dtype](plan.loops, x.data_ptr(), hardness.address, y.data_ptr(), _threads(x))
    return y


def backward(
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
            return backward(dense_x, torch.empty_like(dense_x).copy_(delta), hardness, gate, needs_x, sums)
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
    loops = merged_loops(shape, strides)
    axes = varying_axes(loops.strides[hardness])
    if len(loops.sizes) > MAX_AXES or len(axes) > 1:
        return None
    return _Plan(LoopsArgument.of(loops), axes[0] if axes else -1)


@functools.lru_cache(maxsize=1024)
def _flat_plan(size: int, operands: int, hardness: int) -> _Plan:
    """For contiguous operands and one λ."""
    strides = tuple((0,) if position == hardness else (1,) for position in range(operands))
    return _Plan(LoopsArgument.of(Loops((size,), strides)), -1)


def _loaded(gate: str) -> Library:
    library = load_library(gate)
    if library is None:  # as after a refusal that was not asked for
        raise RuntimeError(f"the kernel 'cpu' cannot be used here: {load_failure(gate)}")
    return library


def _threads(x: Tensor) -> int:
    # One or all, as in torch: OpenMP ends threads that a smaller team leaves out, and has to start them again.
    return torch.get_num_threads() if x.numel() > _ALONE else 1
