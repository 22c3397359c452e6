"""Every row of KERNELS, and what `lambda_gelu` picks: memory, work, higher orders and `torch.func`."""

import oracle
import pytest
import torch
from expectations import assert_within, random
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, vmap
from torch.nn import functional as F

from hf_lgelu.activation.functional import lambda_gelu
from hf_lgelu.activation.kernels import KERNELS
from hf_lgelu.activation.kernels.plain import opaque_refusal

HALVES = [torch.float16, torch.bfloat16]


def saved_bytes(function, x, hardness):
    """Bytes of the distinct storages that autograd keeps for backward."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        value = function(x, hardness)
    assert value.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
@pytest.mark.parametrize("function", [KERNELS["aten"].function, lambda_gelu], ids=["aten", "lambda_gelu"])
def test_only_x_and_hardness_are_kept_for_backward(function, dtype):
    x = torch.randn(128, 64).to(dtype).requires_grad_()
    hardness = torch.tensor([2.0], requires_grad=True)
    assert saved_bytes(function, x, hardness) == x.numel() * dtype.itemsize + 4 * hardness.numel()


# Higher orders and torch.func


def test_second_derivatives_stay_finite(transformable):
    x = torch.tensor([3e38, -3e38, 1e20, 10.0, 1e-30, 0.0], requires_grad=True)
    hardness = torch.tensor([1e4], requires_grad=True)
    first = torch.autograd.grad(transformable(x, hardness).sum(), (x, hardness), create_graph=True)
    second = torch.autograd.grad(first[0].sum() + first[1].sum(), (x, hardness))
    assert all(bool(torch.isfinite(result).all()) for result in second)


def test_vmap_over_hardness_alone(transformable):
    """An ensemble: one input, a row of hardnesses; gradients stay apart."""
    x, hardness = random(6, seed=18, dtype=torch.float64), torch.tensor([[1.0], [2.0], [30.0]], dtype=torch.float64)
    got = vmap(transformable, in_dims=(None, 0))(x, hardness)
    torch.testing.assert_close(got, oracle.value(x, hardness), rtol=0, atol=1e-12)
    got = vmap(grad(lambda x, h: transformable(x, h).sum(), argnums=1), in_dims=(None, 0))(x, hardness)
    wanted = oracle.derivative_in_hardness(x, hardness).sum(1, keepdim=True)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", HALVES)
def test_forward_mode_in_half_precision(transformable, dtype):
    x, tangent = random(256, seed=20, dtype=dtype), random(256, seed=21, dtype=dtype)
    hardness, rate = torch.tensor([20.0]), torch.tensor([3.0])
    value, got = torch.func.jvp(transformable, (x, hardness), (tangent, rate))
    exact = tangent.double() * oracle.derivative_in_x(x, hardness)
    exact = exact + rate.double() * oracle.derivative_in_hardness(x, hardness)
    assert value.dtype == got.dtype == dtype
    eps = torch.finfo(dtype).eps
    scale = tangent.double().abs() + rate.double() * oracle.derivative_in_hardness(x, hardness)
    # Autograd's own forward mode may round each of the two terms.
    assert_within(got, exact, 2 * eps * scale)


# Tensors without memory to read, which the fused kernels must leave to torch


def test_zeros_that_are_only_implied():
    # A null pointer with a shape: what torch's forward mode hands about for a tangent of zero, without a public name.
    zeros = torch._efficientzerotensor(5)
    assert "implied" in opaque_refusal(zeros, torch.ones(1))
    assert torch.equal(lambda_gelu(zeros, 2.0), F.gelu(zeros))
    x, hardness = random(5, seed=1).requires_grad_(), torch.tensor([2.0], requires_grad=True)
    lambda_gelu(x, hardness).backward(zeros)
    assert [*x.grad.tolist(), *hardness.grad.tolist()] == [0.0] * 6
