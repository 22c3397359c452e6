"""The λ-gates in Triton for CUDA and ROCm devices, with one λ for all of x: a fused pass forward and one backward.

It was tested on an H100 and in Triton's interpreter. The first use on a device compares its results with torch's there.
If it does not run or does not agree, the automatic choice goes on to "aten". Arithmetic is float32. Nothing waits for
the device, and ∂λ is added up in a fixed order, so that its bits repeat. Importing this module imports Triton.
"""

import logging
import subprocess
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from hf_lgelu.activation.gates import DEFAULT_GATE
from hf_lgelu.activation.kernels import aten, plain

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GATES = ("lambda_gelu", "lambda_gelu_tanh", "lambda_silu")

BLOCK = 2048
"""Elements per program. It fixes the order in which ∂λ is added up, so it is never tuned to the device."""

_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}  # fused multiply-add must be named: it is off from Triton 3.10 on

SCALE = tl.constexpr(0.8493218002880191)  # √(log₂(e)/2): e^(−u²/2) is 2^(−r²) with r = SCALE·|u|
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
STEEPNESS = tl.constexpr(0.36)
LOG2_E = tl.constexpr(1.4426950408889634)
LINEAR = tl.constexpr(1.5957691216057308)  # 2·√(2/π): x·½(1 + tanh) is x·σ(q), q = LINEAR·(u + CUBIC·u³)
CUBIC = tl.constexpr(0.044715)
FLAT = tl.constexpr(16.0)  # the |u| from which on the tanh form no longer changes


@triton.jit
def _half_erfcx(r):
    # Φ(−u)·e^(u²/2) = erfcx(u/√2)/2 as a polynomial in t = 1/(1 + 0.36·r): the minimax fit of degree 8 over 0 ≤ u ≤ 13,
    # relative error 1.2e-7, exactly 1/2 at 0. One exponential serves Φ and φ, and keeps the digits of the lower tail,
    # which (1 + erf)/2 cancels. The root is one instruction, a division seven.
    d = 1.0 + STEEPNESS * r
    t = tl.rsqrt(d * d)
    p = 0.03632238
    p = p * t - 0.15023792
    p = p * t + 0.17923878
    p = p * t - 0.03274718
    p = p * t + 0.11845703
    p = p * t + 0.10435515
    p = p * t + 0.12266433
    p = p * t + 0.12194744
    return p * t


@triton.jit
def _logistic(x, exponent):
    """σ and σ′ for ±exponent, with the sign of x; `exponent` is ≥ 0."""
    exponential = tl.exp2(-exponent * LOG2_E)
    t = 1.0 / (1.0 + exponential)
    tail = exponential * t
    return tl.where(x < 0, tail, 1.0 - tail), tail * t


@triton.jit
def _step_and_density(x, hardness, gate: tl.constexpr):
    """G(u) and g(u) for u = λx. NaN stays NaN in G; at ±inf, G is 1 or 0, and g is 0."""
    if gate == "lambda_gelu":
        r = tl.abs(x) * (hardness * SCALE)
        # The exponential needs no clamp: it vanishes long before its product with x can overflow, also for infinite r.
        exponential = tl.exp2(-r * r)
        tail = exponential * _half_erfcx(r)
        step, density = tl.where(x < 0, tail, 1.0 - tail), exponential * INV_SQRT_2PI
    elif gate == "lambda_silu":
        step, density = _logistic(x, tl.abs(x) * hardness)
    else:
        tl.static_assert(gate == "lambda_gelu_tanh")
        r = tl.abs(x) * hardness
        r = tl.where(r > FLAT, FLAT, r)
        square = r * r
        step, density = _logistic(x, r * (1.0 + square * CUBIC) * LINEAR)
        density = density * (1.0 + square * (3.0 * CUBIC)) * LINEAR
    return step, density


@triton.jit
def _hardness(hardness_ptr, temperature_ptr, override_ptr):
    """λ as given, or from s: the override if it is 1 or more, else 1 + softplus(s/t)."""
    hardness = tl.load(hardness_ptr).to(tl.float32)
    if temperature_ptr is not None:
        z = hardness / tl.load(temperature_ptr).to(tl.float32)
        # log(1 + e^−|z|) loses digits of a small softplus, but no digits of 1 + softplus.
        learned = 1.0 + (tl.where(z > 0, z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z))))
        override = tl.load(override_ptr).to(tl.float32)
        hardness = tl.where(override >= 1, override, learned)
    return hardness


@triton.jit
def _forward(
    x_ptr,
    y_ptr,
    hardness_ptr,
    temperature_ptr,
    override_ptr,
    n,
    block: tl.constexpr,
    gate: tl.constexpr,
):
    hardness = _hardness(hardness_ptr, temperature_ptr, override_ptr)
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    step, _ = _step_and_density(x, hardness, gate)
    tl.store(y_ptr + i, (x * step).to(y_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def _backward(
    x_ptr,
    delta_ptr,
    grad_x_ptr,
    partial_ptr,
    hardness_ptr,
    temperature_ptr,
    override_ptr,
    n,
    block: tl.constexpr,
    gate: tl.constexpr,
):
    """δ·(G(u) + u·g(u)), and per program the sum of δ·λ·∂f/∂λ = δ·λx²·g(u); either pointer may be None."""
    hardness = _hardness(hardness_ptr, temperature_ptr, override_ptr)
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    # Past the end both are 0, which adds nothing to the sum.
    x = tl.load(x_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    step, density = _step_and_density(x, hardness, gate)
    slope = x * (hardness * density)  # in this order no finite x or λ overflows
    if grad_x_ptr is not None:
        tl.store(grad_x_ptr + i, (delta * (step + slope)).to(grad_x_ptr.dtype.element_ty), mask=i < n)
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0), tl.sum(delta * (x * slope), axis=0))


@triton.jit
def _finish(partial_ptr, out_ptr, hardness_ptr, temperature_ptr, override_ptr, programs, block: tl.constexpr):
    """Σ partial / λ, the gradient of λ; times ∂λ/∂s = σ(s/t)/t where s is given, exactly 0 while an override rules."""
    sums = tl.zeros((block,), dtype=tl.float32)
    start = 0
    # Not `for`: with numpy 2.4, the interpreter of Triton 3.6 has no range over an argument.
    while start < programs:
        p = start + tl.arange(0, block)
        sums += tl.load(partial_ptr + p, mask=p < programs, other=0.0)
        start += block
    gradient = tl.sum(sums, axis=0) / _hardness(hardness_ptr, temperature_ptr, override_ptr)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr).to(tl.float32)
        z = tl.load(hardness_ptr).to(tl.float32) / temperature
        decayed = tl.exp(-tl.abs(z))
        gradient = gradient * (tl.where(z > 0, 1.0, decayed) / (1.0 + decayed) / temperature)
        gradient = tl.where(tl.load(override_ptr).to(tl.float32) >= 1, 0.0, gradient)
    tl.store(out_ptr, gradient.to(out_ptr.dtype.element_ty))


class _LambdaGate(torch.autograd.Function):
    """The gate, differentiable in x and in the hardness: λ itself, or s if t and the override are given."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, hardness: Tensor, temperature: Tensor | None, override: Tensor | None, gate: str
    ) -> Tensor:
        ctx.save_for_backward(x, hardness, temperature, override)
        ctx.gate = gate
        y = torch.empty_like(x)  # in the memory order of x, as torch's own functions do
        if x.numel():
            state, programs = (hardness, temperature, override), triton.cdiv(x.numel(), BLOCK)
            with torch.cuda.device_of(x):
                _forward[(programs,)](plain.laid_as(y, x), y, *state, x.numel(), block=BLOCK, gate=gate, **_OPTIONS)
        return y

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, *state = ctx.saved_tensors
        hardness = state[0]
        needs_x, needs_hardness = ctx.needs_input_grad[:2]
        if plain.is_visible_backward(x, delta):
            return *aten.learned_gradients(x, state, delta, needs_x, needs_hardness, ctx.gate), None, None, None
        dense = torch.empty_like(x)
        if x.numel() == 0:
            return dense if needs_x else None, torch.zeros_like(hardness) if needs_hardness else None, None, None, None
        programs = triton.cdiv(x.numel(), BLOCK)
        partial = x.new_empty(programs, dtype=torch.float32) if needs_hardness else None
        operands = plain.laid_as(dense, x), plain.laid_as(dense, delta), dense if needs_x else None, partial
        with torch.cuda.device_of(x):
            _backward[(programs,)](*operands, *state, x.numel(), block=BLOCK, gate=ctx.gate, **_OPTIONS)
            if partial is not None:
                total = torch.empty_like(hardness)
                _finish[(1,)](partial, total, *state, programs, block=2 * BLOCK, **_OPTIONS)
        return operands[2], None if partial is None else total, None, None, None


def lambda_gate(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> Tensor:
    """x·G(λx) in one pass; saves x and λ."""
    return _LambdaGate.apply(x, hardness, None, None, gate)


def learned_lambda_gate(
    x: Tensor, raw_hardness: Tensor, temperature: Tensor, override: Tensor, gate: str = DEFAULT_GATE
) -> Tensor:
    """x·G(λx) with λ formed from s, t and the override on the device; saves x and these three."""
    return _LambdaGate.apply(x, raw_hardness, temperature, override, gate)


def input_refusal(x: Tensor, hardness: Tensor, gate: str = DEFAULT_GATE) -> str | None:
    """The reason why no device could take this input, or None."""
    if gate not in _GATES:
        return f"it has no formula for {gate}"
    if x.dtype not in _DTYPES:
        return f"it takes float32, bfloat16 and float16, x is {x.dtype}"
    if hardness.numel() != 1 or hardness.device != x.device:
        return f"it takes one λ on x's device, and this is of shape {tuple(hardness.shape)} on {hardness.device}"
    return plain.opaque_refusal(x, hardness)


_tried: dict[int, str | None] = {}


def device_failure(index: int) -> str | None:
    """The reason why the kernels do not work on CUDA device `index`, found by running them once, or None."""
    if index not in _tried:
        if torch.cuda.is_current_stream_capturing():
            return "they have not run on this device before, and a CUDA graph is being captured"
        _tried[index] = reason = _trial(torch.device("cuda", index))
        if reason is not None:
            logger.warning("λ-GELU does without its Triton kernels on cuda:%d: %s", index, reason)
    return _tried[index]


@torch.inference_mode(False)
@torch.enable_grad()
def _trial(device: torch.device) -> str | None:
    """The reason why the kernels do not run on a device, or do not agree with torch, or None."""
    x = torch.linspace(-6, 6, 2 * BLOCK, device=device, dtype=torch.float32, requires_grad=True)
    hardness, delta = x.new_full((1,), 1.5, requires_grad=True), torch.cos(x.detach())
    try:
        y = lambda_gate(x, hardness)
        got = (y, *torch.autograd.grad(y, (x, hardness), delta))
    except torch.OutOfMemoryError:
        raise
    except (TritonError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        return f"they do not run: {' '.join(str(error).split())[:300]}"
    with torch.no_grad():
        wanted = (plain.lambda_gate(x, hardness), *aten.gradients(x, hardness, delta, True, True))
    if all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, wanted, strict=True)):
        return None
    return "their results differ from torch's; please report the device and the versions"
