"""The λ-gates on visible torch operations, which can be exported, compiled, transformed or checked.

`lambda_gate` is the readable reference, and exported graphs consist of it. `traced_lambda_gate` is for torch.compile.
Its hand-written derivatives share one exponential: autograd through the reference would give the compiler erf, whose
code takes an exponential of its own, and the masks of two clamps. `opaque_refusal` says where kernels whose operations
torch cannot see must not run.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hf_lgelu.activation.gates import DEFAULT_GATE, GATES, Gate

_PLAIN = (Tensor, torch.nn.Parameter)


def internal_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64 input, float32 for every narrower input."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def gate_argument(x: Tensor, hardness: Tensor, gate: Gate) -> Tensor:
    """v = λx·scale, clamped where G no longer changes; x and `hardness` in the internal dtype."""
    limit = gate.limit(x.dtype)
    # Scaled on λ's side, because compiled code repeats this for every few elements.
    return torch.clamp(x * (hardness * gate.scale), -limit, limit)


def lambda_gate(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> Tensor:
    """x·G(λx) with internals in float32 or wider; the result has the shape and dtype of `x`."""
    row = GATES[gate]
    dtype = internal_dtype(x)
    wide = x.to(dtype)
    y = wide * row.step(gate_argument(wide, hardness.to(dtype), row))
    # Not traced: torch.jit.trace compares what it recorded with a second run, under no_grad.
    if torch.is_grad_enabled() and x.requires_grad and not torch.jit.is_tracing():
        # This 0 has derivative NaN at an infinite x, like the plain activation; the clamp of v would hide ∞·0.
        y = y + 0 * torch.clamp(wide * wide, max=1)
    return y.to(x.dtype)


_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_TANH_SLOPE = math.sqrt(2.0 / math.pi)
_TANH_CUBE = 0.044715

# erfc(v)·e^(v²) ≈ Σ a_i t^i with t = 1/(1 + p·v), v ≥ 0, to 1.5e-7: Abramowitz and Stegun 7.1.26, as in torch's
# vectorized erf. Here a_i/2, for Φ, and p/√2, for u.
_P = 0.3275911 / math.sqrt(2.0)
_HALF_A = tuple(a / 2 for a in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))

_LARGEST_EXPONENT = 64.0
"""From this z on, e^(−z) < 1.7e-28 counts as 0. A subnormal value, also as a product with a small δ, would make every
operation on it many times slower."""


def _exponential(z: Tensor) -> Tensor:
    """e^(−z), exactly 0 from _LARGEST_EXPONENT on, also for an infinite z; NaN stays."""
    return torch.exp(-torch.where(z >= _LARGEST_EXPONENT, math.inf, z))


def _gaussian(u: Tensor) -> tuple[Tensor, Tensor]:
    exponential = _exponential(0.5 * u * u)
    t = 1.0 / (1.0 + _P * u.abs())
    polynomial = _HALF_A[4]
    for coefficient in reversed(_HALF_A[:4]):
        polynomial = coefficient + t * polynomial
    tail = t * polynomial * exponential
    return torch.where(u > 0, 1.0 - tail, tail), exponential * _INV_SQRT_2PI


def _logistic(u: Tensor) -> tuple[Tensor, Tensor]:
    exponential = _exponential(u.abs())
    t = 1.0 / (1.0 + exponential)
    return torch.where(u > 0, t, exponential * t), exponential * t * t


def _tanh(u: Tensor) -> tuple[Tensor, Tensor]:
    bounded = u.clamp(-16.0, 16.0)  # both are constant from there on, and u³ could overflow
    square = bounded * bounded
    step, density = _logistic(2.0 * _TANH_SLOPE * bounded * (1.0 + _TANH_CUBE * square))
    return step, density * (2.0 * _TANH_SLOPE * (1.0 + 3.0 * _TANH_CUBE * square))


_STEPS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "lambda_gelu": _gaussian,
    "lambda_gelu_tanh": _tanh,
    "lambda_silu": _logistic,
}
"""u → (G(u), g(u)), to float32's accuracy."""


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hardness: Tensor, gate: str) -> Tensor:
        ctx.save_for_backward(x, hardness)
        ctx.gate = gate
        wide = x.to(torch.float32)
        step, _ = _STEPS[gate](wide * hardness.to(torch.float32))
        return (wide * step).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, Tensor, None]:
        x, hardness = ctx.saved_tensors
        wide, wide_delta, slope = x.to(torch.float32), delta.to(torch.float32), hardness.to(torch.float32)
        step, density = _STEPS[ctx.gate](wide * slope)
        # x·g(λx) first: at infinity it is ∞·0, and the gradient is NaN like the plain activation's.
        scaled = wide * density
        grad_x = wide_delta * (step + slope * scaled)
        # The compiler leaves this out where λ needs no gradient.
        grad_hardness = (wide_delta * scaled * wide).sum_to_size(hardness.shape)
        return grad_x.to(x.dtype), grad_hardness.to(hardness.dtype), None


def traced_lambda_gate(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> Tensor:
    """x·G(λx); saves x and λ. It has first derivatives only, like all code from torch.compile."""
    return _Traced.apply(x, hardness, gate)


def traced_refusal(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> str | None:
    """The reason why this form does not fit this input here and now, or None."""
    if gate not in _STEPS:
        return f"it has no formula for {gate}"
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return "it is only for torch.compile (exported graphs take 'eager')"
    if torch._C._are_functorch_transforms_active():
        return "torch.func needs operations that it can transform"
    if internal_dtype(x) == torch.float64:
        return "its steps are accurate to float32"
    return None


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is of torch's own class, and not of a class derived from it."""
    return type(tensor) in _PLAIN


def laid_as(dense: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` in the memory order of `dense`, which has no gaps."""
    if tensor.stride() == dense.stride() or (tensor.is_contiguous() and dense.is_contiguous()):
        return tensor
    return torch.empty_like(dense).copy_(tensor)


def opaque_refusal(x: Tensor, hardness: Tensor) -> str | None:
    """The reason why torch has to see the operations inside, or None if a kernel may use the memory itself."""
    if torch.compiler.is_compiling():
        return "torch.compile and torch.export need operations that they can trace"
    if not (is_plain(x) and is_plain(hardness)):
        return f"it takes plain tensors, not {type(x).__name__} and {type(hardness).__name__}"
    if x.layout is not torch.strided or x.is_neg() or hardness.is_neg():
        return "it takes tensors that lie in memory as they are: strided, and with no sign still to be flipped"
    if x._is_zerotensor() or hardness._is_zerotensor():
        return "it takes tensors that have memory, not implied zeros"
    if torch._C._are_functorch_transforms_active():
        return "torch.func needs operations that it can transform"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives need differentiable operations"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a TorchDispatchMode is watching the operations"
    if torch.jit.is_tracing():
        return "torch.jit.trace needs operations that it can record"
    return None


def is_followed(delta: Tensor) -> bool:
    """Whether autograd (create_graph) or a batch of incoming gradients follows the operations of a backward pass.

    Then the operations must be differentiable and overwrite nothing, and no kernel may read memory.
    """
    # is_grads_batched and gradcheck use the older of torch's two vmaps.
    return (
        torch.is_grad_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(delta)
    )


def is_visible_backward(x: Tensor, delta: Tensor) -> bool:
    """Whether a backward pass has to consist of operations that torch can see."""
    return is_followed(delta) or opaque_refusal(x, delta) is not None
