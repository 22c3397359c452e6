"""The C++ kernel with λ formed inside from s, t and the override, and derivatives beyond the first."""

import math

import oracle
import pytest
import torch
from expectations import assert_within, random

from hf_lgelu.activation.hardness import raw_from_hardness
from hf_lgelu.activation.kernels.cpu import function as cpu


def learned(raw, temperature, override, x, delta):
    """(y, ∂x, ∂s)."""
    x, raw = x.detach().requires_grad_(), raw.detach().requires_grad_()
    y = cpu.learned_lambda_gate(x, raw, temperature, override)
    return y.detach(), *torch.autograd.grad(y, (x, raw), delta)


X, DELTA = random(500, seed=19), random(500, seed=20)
T, NO_OVERRIDE = torch.tensor([0.1]), torch.zeros(1)


@pytest.mark.parametrize("raw", [-1.0, -0.05, 0.0, 0.7, 3.99, 4.01, 30.0])
def test_a_learned_hardness(raw):
    raw = torch.tensor([raw])
    hardness = oracle.hardness_of(raw, 0.1)
    y, grad_x, grad_raw = learned(raw, T, NO_OVERRIDE, X, DELTA)
    assert_within(y, oracle.value(X, hardness), 5e-7 * X.double().abs())
    assert_within(grad_x, DELTA.double() * oracle.derivative_in_x(X, hardness), 5e-7 * DELTA.double().abs())
    terms = DELTA.double() * oracle.derivative_in_hardness(X, hardness) * oracle.hardness_rate(raw, 0.1)
    assert_within(grad_raw, terms.sum(), 1e-5 * terms.abs().sum())


@pytest.mark.parametrize("raw", [-1e30, -math.inf])
def test_s_far_below_zero_is_gelu_with_a_gradient_of_zero(raw):
    y, _, grad_raw = learned(torch.tensor([raw]), T, NO_OVERRIDE, X, DELTA)
    assert_within(y, oracle.value(X, torch.tensor(1.0)), 5e-7 * X.double().abs())
    assert grad_raw.tolist() == [0.0]


def test_second_derivatives_go_through_operations_that_have_them():
    raw, x = torch.tensor([raw_from_hardness(1.5)], requires_grad=True), torch.tensor([0.4], requires_grad=True)
    (slope,) = torch.autograd.grad(cpu.learned_lambda_gate(x, raw, T, NO_OVERRIDE), x, create_graph=True)
    by_x, by_raw = torch.autograd.grad(slope, (x, raw))
    hardness = oracle.hardness_of(raw.detach(), 0.1)
    u, density = 0.4 * hardness, oracle.density(0.4 * hardness)
    # ∂²f/∂x² = λφ(u)(2 − u²), ∂²f/∂x∂λ = xφ(u)(2 − u²)
    assert_within(by_x, hardness * density * (2 - u**2), 1e-5)
    assert_within(by_raw, 0.4 * density * (2 - u**2) * oracle.hardness_rate(raw.detach(), 0.1), 1e-4)


def test_batched_gradients():
    x, raw = X[:6].clone().requires_grad_(), torch.tensor([0.05], requires_grad=True)
    y = cpu.learned_lambda_gate(x, raw, T, NO_OVERRIDE)
    rows, of_raw = torch.autograd.grad(y, (x, raw), torch.eye(6), is_grads_batched=True)
    hardness = oracle.hardness_of(raw.detach(), 0.1)
    assert_within(rows, torch.diag(oracle.derivative_in_x(X[:6], hardness)), 1e-6)
    wanted = oracle.derivative_in_hardness(X[:6], hardness) * oracle.hardness_rate(raw.detach(), 0.1)
    assert_within(of_raw, wanted[:, None], 1e-5 * wanted.max())


def test_a_temperature_of_zero_gives_nan():
    """As in a state that was allocated and never loaded."""
    y, _, grad_raw = learned(torch.tensor([0.0]), torch.zeros(1), NO_OVERRIDE, X, DELTA)
    assert bool(y.isnan().all())
    assert bool(grad_raw.isnan().all())
