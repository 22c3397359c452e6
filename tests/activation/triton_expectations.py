"""Sample input on the device of the Triton kernels' tests, and the comparison with the oracle.

The device is a GPU, or with TRITON_INTERPRET=1 the CPU through Triton's interpreter.
"""

import os

import oracle
import pytest
import torch
from expectations import assert_within, random, values_and_gradients

from hf_lgelu.activation.kernels.triton.function import lambda_gate
from hf_lgelu.activation.kernels.triton.pattern import FLAT_BLOCK

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
MARKS = [] if INTERPRETED else [pytest.mark.gpu]

HARDNESSES = [1.0, 2.0, 20.0, 160.0]
HALVES = [torch.float16, torch.bfloat16]
RAGGED = 3 * FLAT_BLOCK + 37
ACCURACY = 5e-7

# Same shape, other strides.
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "cut": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "expanded": lambda x: x[:, :1].expand_as(x),
}


def sample(*shape, **options):
    return random(*shape, **options).to(DEVICE)


def assert_accurate(x, hardness, delta, function=lambda_gate, rounding=0.0, smallest=0.0, gate="lambda_gelu"):
    """The bounds of value, ∂x and ∂λ; `rounding` is that of the dtype of x."""
    got, got_x, got_hardness = (t.cpu() for t in values_and_gradients(function, x, hardness, delta))
    x, hardness, delta = x.cpu(), hardness.cpu(), delta.cpu()
    want, want_x = oracle.value(x, hardness, gate), delta.double() * oracle.derivative_in_x(x, hardness, gate)
    assert_within(got, want, rounding * want.abs() + ACCURACY * x.double().abs() + smallest)
    assert_within(got_x, want_x, rounding * want_x.abs() + ACCURACY * delta.double().abs() + smallest)
    terms = delta.double() * oracle.derivative_in_hardness(x, hardness, gate)
    # Past |u| = 8, where u²φ is below 1e-12, float32 rounds u² too coarsely to tell φ to 1e-5.
    beyond = 1e-12 * delta.double().abs() / hardness.double().square()
    slack = (1e-5 * terms.abs() + beyond).sum_to_size(hardness.shape)
    assert_within(got_hardness, terms.sum_to_size(hardness.shape), slack)


def one(hardness):
    return torch.tensor([hardness], device=DEVICE)
