"""The C++ kernel: accuracy, what is not finite, threads, and what it refuses."""

import math
import shutil

import oracle
import pytest
import torch
from expectations import X, assert_within, random, values_and_gradients
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_lgelu.activation.gates import GATES
from hf_lgelu.activation.kernels.cpu import function as cpu

HARDNESSES = [1.0, 2.0, 20.0, 160.0]


def test_it_is_here_where_there_is_a_compiler():
    assert shutil.which("c++") or shutil.which("g++"), "the other tests of this file need a C++ compiler"
    assert cpu.unavailable("lambda_gelu") is None


@pytest.mark.parametrize("hardness", HARDNESSES)
@pytest.mark.parametrize(("depth", "accuracy"), [(5, 1e-4), (8, 1e-3)])
def test_the_lower_tail_keeps_its_digits(hardness, depth, accuracy):
    x = torch.linspace(-depth, -0.01, 4001) / hardness
    y, grad_x, _ = values_and_gradients(cpu.lambda_gate, x, torch.tensor([hardness]), torch.ones_like(x))
    relative = (y.double() / oracle.value(x, torch.tensor(hardness)) - 1).abs().max().item()
    assert relative < accuracy
    gelu = F.gelu(x * hardness).double() / oracle.value(x * hardness, torch.tensor(1.0))
    assert relative < 0.01 * (gelu - 1).abs().max().item()
    # ∂f/∂x crosses zero at u = -0.7518; before it, it falls like the tail itself.
    deep = x < -1 / hardness
    wanted = oracle.derivative_in_x(x, torch.tensor(hardness))
    assert_within(grad_x[deep], wanted[deep], accuracy * wanted[deep].abs())


@pytest.mark.parametrize("gate", [gate for gate in GATES if cpu.unavailable(gate) is None])
def test_every_bfloat16_number_is_the_rounded_float32_result(gate):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[torch.isfinite(x)]
    for hardness in (1.0, 160.0):
        narrow = cpu.lambda_gate(x, torch.tensor([hardness]), gate)
        assert torch.equal(narrow, cpu.lambda_gate(x.float(), torch.tensor([hardness]), gate).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 3, 17, 4096])
def test_what_is_not_finite_is_so_as_in_gelu(dtype, length):
    special = torch.tensor([math.nan, math.inf, -math.inf, -math.nan], dtype=dtype)
    for value in special:
        x = torch.full((length,), value.item(), dtype=dtype)
        exact = x.double().requires_grad_()
        F.gelu(exact).backward(torch.ones_like(exact))
        y, grad_x, _ = values_and_gradients(cpu.lambda_gate, x, torch.tensor([2.0]), torch.ones_like(x))
        assert y.double().tolist() == pytest.approx(F.gelu(x.double()).tolist(), nan_ok=True)
        assert grad_x.double().tolist() == pytest.approx(exact.grad.tolist(), nan_ok=True)


def test_a_nan_of_any_bits_stays_a_nan():
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, 0x7FD55555], dtype=torch.int32)
    y, grad_x, _ = values_and_gradients(cpu.lambda_gate, bits.view(torch.float32), torch.ones(1), torch.ones(5))
    assert bool(y.isnan().all())
    assert bool(grad_x.isnan().all())
    narrow = torch.tensor([0x7F81, 0x7FFF, 0x7FC0, -1], dtype=torch.int16).view(torch.bfloat16)
    assert bool(cpu.lambda_gate(narrow, torch.ones(1)).isnan().all())


@pytest.mark.parametrize("shape", [(1,), (40,)])
def test_a_hardness_that_is_a_nan_of_any_bits_gives_nan(shape):
    for bits in (0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000):
        hardness = torch.full(shape, bits, dtype=torch.int32).view(torch.float32)
        for dtype in (torch.float32, torch.bfloat16):
            y = cpu.lambda_gate(random(40, seed=24, dtype=dtype), hardness)
            assert bool(y.isnan().all())


def test_subnormals_are_numbers_here_and_elsewhere():
    x = torch.tensor([1e-40, -1e-40, 3e-45, -3e-45])
    y, grad_x, _ = values_and_gradients(cpu.lambda_gate, x, torch.tensor([160.0]), torch.ones_like(x))
    assert torch.equal(y, F.gelu(x))
    assert grad_x.tolist() == [0.5] * 4
    # The library is not linked with -ffast-math, which would flush them to zero in the whole process.
    assert (torch.tensor([1e-40]) * 2).item() > 0


# Threads


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1,), (256,), (300, 1)])
def test_bits_do_not_depend_on_the_number_of_threads(threads, shape):
    x, delta, hardness = random(300, 256, seed=16), random(300, 256, seed=17), 1 + random(*shape, seed=18).abs()
    results = []
    for count in (1, 2, 3, 1):
        threads(count)
        results.append(values_and_gradients(cpu.lambda_gate, x, hardness, delta))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# Refusals


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def test_refusals_say_why():
    one = torch.ones(1)
    assert cpu.refusal(X, one) is None
    assert "float16" in cpu.refusal(X.half(), one)
    assert "meta" in cpu.refusal(X.to("meta"), one)
    assert "Subclass" in cpu.refusal(X.as_subclass(Subclass), one)
    assert "on cpu and the hardness on meta" in cpu.refusal(X, one.to("meta"))
    assert "strided" in cpu.refusal(X.to_sparse(), one)
    assert "sign" in cpu.refusal(torch.complex(X, X).conj().imag, one)
    assert "along several axes" in cpu.refusal(random(4, 3, 9), torch.ones(4, 1, 9))
    assert "too often" in cpu.refusal(random(4, 7), torch.ones(7))
    assert cpu.refusal(random(4, 8), torch.ones(8)) is None
    with Watching():
        assert "TorchDispatchMode" in cpu.refusal(X, one)
    with torch.autograd.forward_ad.dual_level():
        assert "forward-mode" in cpu.refusal(X, one)
    inside = []
    torch.func.vmap(lambda x: (inside.append(cpu.refusal(x, one)), x)[1])(X)
    assert "torch.func" in inside[0]
