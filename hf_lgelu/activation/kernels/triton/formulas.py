"""The λ-gates and their derivatives for one tile, as device code. Arithmetic is float32.

`gate` is a key of GATES, known when a kernel is compiled.
"""

import triton
import triton.language as tl

SCALE = tl.constexpr(0.8493218002880191)
"""√(log₂(e)/2): e^(−u²/2) is 2^(−r²) with r = SCALE·|u|."""

INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
STEEPNESS = tl.constexpr(0.36)
LOG2_E = tl.constexpr(1.4426950408889634)
LINEAR = tl.constexpr(1.5957691216057308)
"""2·√(2/π): x·½(1 + tanh) is x·σ(q), q = LINEAR·(u + CUBIC·u³)."""

CUBIC = tl.constexpr(0.044715)
FLAT = tl.constexpr(16.0)
"""The |u| from which on the tanh form no longer changes."""


@triton.jit
def _half_erfcx(r):
    # Φ(−u)·e^(u²/2) = erfcx(u/√2)/2 as a polynomial in t = 1/(1 + 0.36·r): the minimax fit of degree 8 over
    # 0 ≤ u ≤ 13, relative error 1.2e-7, and exactly 1/2 at 0 in float32. One exponential serves Φ and φ, fewer
    # instructions than erf and exp, and keeps the digits of the lower tail that (1 + erf)/2 cancels.
    # The root is one instruction where a division is seven.
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
def gaussian(x, hardness):
    """Φ(u) and e^(−u²/2) for u = λx. NaN stays NaN; at ±inf they are 1 or 0, and 0."""
    r = tl.abs(x) * (hardness * SCALE)
    # Needs no clamp: it vanishes long before an x that is multiplied by it can overflow, also where r is infinite.
    exponential = tl.exp2(-r * r)
    tail = exponential * _half_erfcx(r)
    return tl.where(x < 0, tail, 1.0 - tail), exponential


@triton.jit
def logistic(x, exponent):
    """σ and σ′ for ±exponent, with the sign of x; `exponent` is ≥ 0."""
    exponential = tl.exp2(-exponent * LOG2_E)
    t = 1.0 / (1.0 + exponential)
    tail = exponential * t
    return tl.where(x < 0, tail, 1.0 - tail), tail * t


@triton.jit
def step_and_density(x, hardness, gate: tl.constexpr):
    """G(u) and g(u) for u = λx. NaN stays NaN in G; at ±inf they are 1 or 0, and 0."""
    if gate == "lambda_gelu":
        step, exponential = gaussian(x, hardness)
        density = exponential * INV_SQRT_2PI
    elif gate == "lambda_silu":
        step, density = logistic(x, tl.abs(x) * hardness)
    else:
        tl.static_assert(gate == "lambda_gelu_tanh")
        r = tl.abs(x) * hardness
        r = tl.where(r > FLAT, FLAT, r)
        square = r * r
        step, density = logistic(x, r * (1.0 + square * CUBIC) * LINEAR)
        density = density * (1.0 + square * (3.0 * CUBIC)) * LINEAR
    return step, density


@triton.jit
def value(x, hardness, gate: tl.constexpr):
    """x·G(λx)."""
    step, _ = step_and_density(x, hardness, gate)
    return x * step


@triton.jit
def derivatives(x, hardness, gate: tl.constexpr):
    """∂f/∂x = G(u) + u·g(u), and λ·∂f/∂λ = λx²·g(u), for u = λx.

    λ·g(u) is multiplied by x first, which no finite x or λ makes overflow.
    """
    step, density = step_and_density(x, hardness, gate)
    slope = x * (hardness * density)
    return step + slope, x * slope


@triton.jit
def is_frozen(override_ptr):
    """Whether the override rules, so that s gets no gradient; False for a λ that is given as such."""
    frozen = False
    if override_ptr is not None:
        frozen = tl.load(override_ptr).to(tl.float32) >= 1
    return frozen


@triton.jit
def one_hardness(hardness_ptr, temperature_ptr, override_ptr):
    """The layer's λ: given, or the override where it is 1 or more, or 1 + softplus(s/t)."""
    hardness = tl.load(hardness_ptr).to(tl.float32)
    if temperature_ptr is not None:
        z = hardness / tl.load(temperature_ptr).to(tl.float32)
        # log(1 + e^−|z|) loses digits of a small softplus, none of 1 + softplus.
        learned = 1.0 + (tl.where(z > 0, z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z))))
        override = tl.load(override_ptr).to(tl.float32)
        hardness = tl.where(override >= 1, override, learned)
    return hardness


@triton.jit
def rate(raw_hardness_ptr, temperature_ptr):
    """∂λ/∂s = σ(s/t)/t."""
    temperature = tl.load(temperature_ptr).to(tl.float32)
    z = tl.load(raw_hardness_ptr).to(tl.float32) / temperature
    decayed = tl.exp(-tl.abs(z))
    return tl.where(z > 0, 1.0, decayed) / (1.0 + decayed) / temperature
