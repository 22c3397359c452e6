"""The sums of the C++ kernel where float32 alone would lose digits, and a λ that lies in memory in another order."""

import oracle
import pytest
import torch
from expectations import assert_within, random, values_and_gradients

from hf_lgelu.activation.kernels.cpu import function as cpu


@pytest.mark.parametrize("value", [0.3, 0.77, 1.9])
@pytest.mark.parametrize(
    ("shape", "hardness_shape"),
    [((300_000,), (1,)), ((9000, 2, 30), (2, 1)), ((90_000, 5), (5,)), ((2, 300_000), (2, 1))],
)
def test_terms_that_are_all_alike(shape, hardness_shape, value):
    """Each addition rounds the same way then: a float32 sum over all of them is off by 1e-4 and more."""
    x, delta, hardness = torch.full(shape, value), torch.full(shape, 1 / 3), torch.full(hardness_shape, 1.3)
    _, _, grad_hardness = values_and_gradients(cpu.lambda_gate, x, hardness, delta)
    each = delta.double().flatten()[0] * oracle.derivative_in_hardness(x.flatten()[:1], torch.tensor(1.3))
    wanted = each * x.numel() / hardness.numel()
    assert_within(grad_hardness, wanted.expand(hardness_shape), 1e-5 * wanted)


@pytest.mark.parametrize(
    "reorder",
    [lambda h: h.t().contiguous().t(), lambda h: h.repeat_interleave(2, 1)[:, ::2]],
    ids=["transposed", "every_second"],
)
def test_a_hardness_in_another_order_than_x(reorder):
    x, delta = random(4, 3, 5, seed=1), random(4, 3, 5, seed=2)
    hardness = reorder(1 + random(3, 5, seed=3).abs())
    y, grad_x, grad_hardness = values_and_gradients(cpu.lambda_gate, x, hardness, delta)
    assert_within(y, oracle.value(x, hardness), 5e-7 * x.double().abs())
    assert_within(grad_x, delta.double() * oracle.derivative_in_x(x, hardness), 5e-7 * delta.double().abs())
    terms = delta.double() * oracle.derivative_in_hardness(x, hardness)
    assert_within(grad_hardness, terms.sum(0), 1e-5 * terms.abs().sum(0))
