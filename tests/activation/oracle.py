"""What λ-GELU must give, worked out without the package: mpmath at 40 digits and float64 closed forms."""

import mpmath
import torch
from mpmath import mpf
from torch import Tensor

mpmath.mp.dps = 40


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


def cdf(u: Tensor) -> Tensor:
    """Φ(u) in float64; torch.special.ndtr loses its digits in the lower tail (2 % at −8)."""
    tail = 0.5 * torch.special.erfcx(u.abs().double() / 2**0.5) * torch.exp(-0.5 * u.double() ** 2)
    return torch.where(u > 0, 1 - tail, torch.where(u.isinf(), 0.0, tail))


def value(x: Tensor, hardness: Tensor) -> Tensor:
    """x·Φ(λx) in float64."""
    x, hardness = x.double(), hardness.double()
    return x * cdf(hardness * x)


def derivative_in_x(x: Tensor, hardness: Tensor) -> Tensor:
    """Φ(u) + u·φ(u) in float64."""
    u = hardness.double() * x.double()
    return cdf(u) + u * density(u)


def derivative_in_hardness(x: Tensor, hardness: Tensor) -> Tensor:
    """x²·φ(λx) per element, in float64."""
    return x.double() ** 2 * density(hardness.double() * x.double())


def hardness_of(raw_hardness: Tensor, temperature: float) -> Tensor:
    """λ(s) in float64."""
    return 1 + torch.log1p(torch.exp(raw_hardness.double() / temperature))


def hardness_rate(raw_hardness: Tensor, temperature: float) -> Tensor:
    """dλ/ds = σ(s/t)/t in float64."""
    return torch.sigmoid(raw_hardness.double() / temperature) / temperature


def sum_to(terms, shape):
    """Add up `terms` over every axis along which a λ of `shape` was broadcast: a plain loop over elements."""
    total = torch.zeros(shape, dtype=torch.float64)
    index = torch.arange(total.numel()).reshape(shape).expand(terms.shape)
    for position, term in zip(index.flatten().tolist(), terms.flatten().tolist(), strict=True):
        total.view(-1)[position] += term
    return total
