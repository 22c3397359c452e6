"""Tensors that have no memory to read: the fused kernels must leave them to torch, or they would crash."""

import torch
from expectations import assert_within, random
from torch.nn import functional as F

from hf_lgelu.activation.functional import lambda_gelu
from hf_lgelu.activation.kernels.plain import opaque_refusal


def test_zeros_that_are_only_implied():
    # A null pointer with a shape: what torch's forward mode hands about for a tangent of zero.
    zeros = torch._efficientzerotensor(5)
    assert "implied" in opaque_refusal(zeros, torch.ones(1))
    assert torch.equal(lambda_gelu(zeros, 2.0), F.gelu(zeros))


def test_an_incoming_gradient_of_implied_zeros():
    x, hardness = random(5, seed=1).requires_grad_(), torch.tensor([2.0], requires_grad=True)
    lambda_gelu(x, hardness).backward(torch._efficientzerotensor(5))
    assert_within(x.grad, torch.zeros(5), 0.0)
    assert hardness.grad.tolist() == [0.0]
