"""What the λ-gates must give, worked out without the package: mpmath at 40 digits and float64 closed forms."""

import mpmath
import torch
from mpmath import mpf
from torch import Tensor

mpmath.mp.dps = 40


def _tanh_argument(u: mpf) -> mpf:
    """q with ½(1 + tanh(√(2/π)·(u + 0.044715·u³))) = σ(q)."""
    return 2 * mpmath.sqrt(2 / mpmath.pi) * (u + mpf("0.044715") * u**3)


def _logistic(u: mpf) -> mpf:
    return 1 / (1 + mpmath.exp(-u))


EXACT_STEPS = {
    "lambda_gelu": mpmath.ncdf,
    "lambda_gelu_tanh": lambda u: _logistic(_tanh_argument(u)),
    "lambda_silu": _logistic,
}
"""Row of GATES → G(u)."""

EXACT_DENSITIES = {
    "lambda_gelu": mpmath.npdf,
    "lambda_gelu_tanh": lambda u: (
        _logistic(_tanh_argument(u))
        * _logistic(-_tanh_argument(u))
        * 2
        * mpmath.sqrt(2 / mpmath.pi)
        * (1 + 3 * mpf("0.044715") * u**2)
    ),
    "lambda_silu": lambda u: _logistic(u) * _logistic(-u),
}
"""Row of GATES → G′(u)."""


def exact_value(x: float, hardness: float, gate: str = "lambda_gelu") -> mpf:
    """x·G(λx)."""
    return mpf(x) * EXACT_STEPS[gate](mpf(hardness) * mpf(x))


def exact_derivative_in_x(x: float, hardness: float, gate: str = "lambda_gelu") -> mpf:
    """G(u) + u·g(u), u = λx."""
    u = mpf(hardness) * mpf(x)
    return EXACT_STEPS[gate](u) + u * EXACT_DENSITIES[gate](u)


def exact_derivative_in_hardness(x: float, hardness: float, gate: str = "lambda_gelu") -> mpf:
    """x²·g(λx)."""
    return mpf(x) ** 2 * EXACT_DENSITIES[gate](mpf(hardness) * mpf(x))


def exact_hardness(raw_hardness: float, temperature: float) -> mpf:
    """λ(s) = 1 + log(1 + e^(s/t))."""
    return 1 + mpmath.log1p(mpmath.exp(mpf(raw_hardness) / mpf(temperature)))


def density(u: Tensor, gate: str = "lambda_gelu") -> Tensor:
    """g(u) in float64."""
    u = u.double().abs()
    if gate == "lambda_gelu":
        return torch.exp(-0.5 * u**2) / (2 * torch.pi) ** 0.5
    q, slope = _exponent(u, gate)
    e = torch.exp(-q)
    return torch.where(u.isinf(), 0.0, e / (1 + e) ** 2 * slope)


def cdf(u: Tensor, gate: str = "lambda_gelu") -> Tensor:
    """G(u) in float64; torch.special.ndtr loses its digits in the lower tail (2 % at −8)."""
    magnitude = u.double().abs()
    if gate == "lambda_gelu":
        tail = 0.5 * torch.special.erfcx(magnitude / 2**0.5) * torch.exp(-0.5 * magnitude**2)
    else:
        e = torch.exp(-_exponent(magnitude, gate)[0])
        tail = e / (1 + e)
    return torch.where(u > 0, 1 - tail, torch.where(u.isinf(), 0.0, tail))


def _exponent(u: Tensor, gate: str) -> tuple[Tensor, Tensor]:
    """q ≥ 0 with G(−|u|) = σ(−q), and ∂q/∂u."""
    beta = 2 * (2 / torch.pi) ** 0.5
    return {
        "lambda_gelu_tanh": (beta * (u + 0.044715 * u**3), beta * (1 + 3 * 0.044715 * u**2)),
        "lambda_silu": (u, torch.ones_like(u)),
    }[gate]


def value(x: Tensor, hardness: Tensor, gate: str = "lambda_gelu") -> Tensor:
    """x·G(λx) in float64."""
    x, hardness = x.double(), hardness.double()
    return x * cdf(hardness * x, gate)


def derivative_in_x(x: Tensor, hardness: Tensor, gate: str = "lambda_gelu") -> Tensor:
    """G(u) + u·g(u) in float64."""
    u = hardness.double() * x.double()
    return cdf(u, gate) + u * density(u, gate)


def derivative_in_hardness(x: Tensor, hardness: Tensor, gate: str = "lambda_gelu") -> Tensor:
    """x²·g(λx) per element, in float64."""
    return x.double() ** 2 * density(hardness.double() * x.double(), gate)


def hardness_of(raw_hardness: Tensor, temperature: float) -> Tensor:
    """λ(s) in float64."""
    return 1 + torch.log1p(torch.exp(raw_hardness.double() / temperature))


def hardness_rate(raw_hardness: Tensor, temperature: float) -> Tensor:
    """dλ/ds = σ(s/t)/t in float64."""
    return torch.sigmoid(raw_hardness.double() / temperature) / temperature


def sum_to(terms, shape):
    """Add up `terms` over every axis along which a λ of `shape` was broadcast: each to the total of its own λ."""
    total = torch.zeros(shape, dtype=torch.float64)
    index = torch.arange(total.numel()).reshape(shape).expand(terms.shape)
    total.view(-1).index_add_(0, index.flatten(), terms.flatten().double())
    return total
