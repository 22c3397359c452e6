"""What λ-GELU must give, worked out without the package: mpmath at 40 digits and float64 closed forms.

And the comparisons with it that the tests of this folder share.
"""

import mpmath
import torch
from mpmath import mpf
from torch import Tensor

mpmath.mp.dps = 40

# What u²·φ(u) may leave per element where λx is clamped, instead of a true value below 1e-35.
CLAMPED = 1e-33


def exact_value(x: float, hardness: float) -> mpf:
    """x·Φ(λx)."""
    return mpf(x) * mpmath.ncdf(mpf(hardness) * mpf(x))


def exact_derivative_in_x(x: float, hardness: float) -> mpf:
    """Φ(u) + u·φ(u), u = λx."""
    u = mpf(hardness) * mpf(x)
    return mpmath.ncdf(u) + u * mpmath.npdf(u)


def exact_derivative_in_hardness(x: float, hardness: float) -> mpf:
    """x²·φ(λx)."""
    return mpf(x) ** 2 * mpmath.npdf(mpf(hardness) * mpf(x))


def exact_hardness(raw_hardness: float, temperature: float) -> mpf:
    """λ(s) = 1 + log(1 + e^(s/t))."""
    return 1 + mpmath.log1p(mpmath.exp(mpf(raw_hardness) / mpf(temperature)))


def density(u: Tensor) -> Tensor:
    """φ(u) in float64."""
    return torch.exp(-0.5 * u.double() ** 2) / (2 * torch.pi) ** 0.5


def value(x: Tensor, hardness: Tensor) -> Tensor:
    """x·Φ(λx) in float64."""
    x, hardness = x.double(), hardness.double()
    return x * torch.special.ndtr(hardness * x)


def derivative_in_x(x: Tensor, hardness: Tensor) -> Tensor:
    """Φ(u) + u·φ(u) in float64."""
    u = hardness.double() * x.double()
    return torch.special.ndtr(u) + u * density(u)


def derivative_in_hardness(x: Tensor, hardness: Tensor) -> Tensor:
    """x²·φ(λx) per element, in float64."""
    return x.double() ** 2 * density(hardness.double() * x.double())


def hardness_of(raw_hardness: Tensor, temperature: float) -> Tensor:
    """λ(s) in float64."""
    return 1 + torch.log1p(torch.exp(raw_hardness.double() / temperature))


def hardness_rate(raw_hardness: Tensor, temperature: float) -> Tensor:
    """dλ/ds = σ(s/t)/t in float64."""
    return torch.sigmoid(raw_hardness.double() / temperature) / temperature


def random(*shape, seed=0, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def assert_within(got, wanted, tolerance):
    """|got − wanted| ≤ tolerance, elementwise and in float64; a NaN fails."""
    error = (got.double() - wanted).abs()
    assert bool((error <= tolerance).all()), f"worst excess {(error - tolerance).max().item():.3g}"


def values_and_gradients(function, x, hardness, delta):
    """(value, ∂x, ∂λ) for the incoming gradient δ."""
    x, hardness = x.detach().requires_grad_(), hardness.detach().requires_grad_()
    output = function(x, hardness)
    assert output.dtype == x.dtype
    assert output.shape == x.shape
    grad_x, grad_hardness = torch.autograd.grad(output, (x, hardness), delta)
    assert (grad_x.dtype, grad_hardness.dtype) == (x.dtype, hardness.dtype)
    assert (grad_x.shape, grad_hardness.shape) == (x.shape, hardness.shape)
    return output.detach(), grad_x, grad_hardness


def sum_to(terms, shape):
    """Add up `terms` over every axis along which a λ of `shape` was broadcast: a plain loop over elements."""
    total = torch.zeros(shape, dtype=torch.float64)
    index = torch.arange(total.numel()).reshape(shape).expand(terms.shape)
    for position, term in zip(index.flatten().tolist(), terms.flatten().tolist(), strict=True):
        total.view(-1)[position] += term
    return total


def assert_matches_closed_form(function, x, hardness, delta, rounding=0.0, smallest=0.0):
    """Value, ∂x and ∂λ against float64. `rounding` is half a unit of the output dtype, relative."""
    got, got_x, got_hardness = values_and_gradients(function, x, hardness, delta)
    want, want_x = value(x, hardness), delta.double() * derivative_in_x(x, hardness)
    terms = delta.double() * derivative_in_hardness(x, hardness)
    assert_within(got, want, rounding * want.abs() + 1e-6 * x.double().abs() + smallest)
    assert_within(got_x, want_x, rounding * want_x.abs() + 1e-6 * delta.double().abs() + smallest)
    slack = 1e-5 * sum_to(terms.abs(), hardness.shape) + CLAMPED * delta.double().abs().sum()
    assert_within(got_hardness, sum_to(terms, hardness.shape), slack)
