"""Sample input, and the comparisons with the oracle that the tests of this folder share."""

import copy
import pickle

import oracle
import torch

from hf_lgelu.activation.kernels import cpu

# How far u²·φ(u) may be off per element where a kernel takes φ for 0, or λx for its clamp: beyond |u| = 10.5.
CLAMPED = 5e-23


def random(*shape, seed=0, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


# Of (B, C, H, W): the same shape, other strides.
LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "strided": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "cut": lambda t: torch.cat([t, t], 2)[:, :, : t.shape[2]],
    "expanded": lambda t: t[:, :1].expand_as(t),
    "offset": lambda t: torch.cat([t, t])[len(t) :],
}


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


def assert_matches_closed_form(
    function, x, hardness, delta, rounding=0.0, smallest=0.0, gate="lambda_gelu", slope_accuracy=5e-7
):
    """Value, ∂x and ∂λ against float64, and the three.

    The bounds are those of every kernel: 5e-7·|x|, `slope_accuracy`·|δ| and 1e-5 of Σ|δ·x²g(λx)|. `rounding` is half
    a unit of the output dtype, relative.
    """
    got, got_x, got_hardness = values_and_gradients(function, x, hardness, delta)
    want, want_x = oracle.value(x, hardness, gate), delta.double() * oracle.derivative_in_x(x, hardness, gate)
    terms = delta.double() * oracle.derivative_in_hardness(x, hardness, gate)
    assert_within(got, want, rounding * want.abs() + 5e-7 * x.double().abs() + smallest)
    assert_within(got_x, want_x, rounding * want_x.abs() + slope_accuracy * delta.double().abs() + smallest)
    slack = 1e-5 * oracle.sum_to(terms.abs(), hardness.shape) + CLAMPED * delta.double().abs().sum()
    assert_within(got_hardness, oracle.sum_to(terms, hardness.shape), slack)
    return got, got_x, got_hardness


def check_cpu(x, hardness, delta, rounding=0.0):
    """`assert_matches_closed_form` of the C++ kernel."""
    return assert_matches_closed_form(cpu.lambda_gate, x, hardness, delta, rounding)


X, DELTA = random(4, 3, 5, seed=1), random(4, 3, 5, seed=2)
"""An activation's input and the incoming gradient."""

CASTS = {
    "to_bfloat16": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "type": lambda m: m.type(torch.float16),
    "device_and_dtype": lambda m: m.to("cpu", torch.float16),
}
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda module: pickle.loads(pickle.dumps(module))}


def override(module, hardness):
    module.hardness_override.fill_(hardness)


def raw_gradient(module, x=X, delta=DELTA):
    module.zero_grad()
    module(x).backward(delta)
    return module.raw_hardness.grad


def assert_evaluates_at(module, hardness, x=X):
    assert_within(module(x).detach(), oracle.value(x, torch.as_tensor(hardness)), 1e-6 * x.double().abs())


def assert_learns(module, temperature, x=X, delta=DELTA, gate="lambda_gelu"):
    """∂L/∂s against δ·x²g(λx)·σ(s/t)/t, in float64."""
    raw = module.raw_hardness.detach()
    rate = oracle.hardness_rate(raw, temperature)
    terms = delta.double() * oracle.derivative_in_hardness(x, oracle.hardness_of(raw, temperature), gate) * rate
    slack = 1e-5 * oracle.sum_to(terms.abs(), raw.shape)
    assert_within(raw_gradient(module, x, delta), oracle.sum_to(terms, raw.shape), slack)


def state_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_state(module, state):
    """Names, dtypes and values, bit for bit."""
    got = module.state_dict()
    assert list(got) == list(state)
    for name, tensor in state.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)
