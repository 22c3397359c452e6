"""The C++ kernel: accuracy, what is not finite, threads, and what it refuses."""

import math
import shutil

import oracle
import pytest
import torch
from expectations import assert_within, check_cpu, random, values_and_gradients
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_lgelu.activation.gates import GATES
from hf_lgelu.activation.hardness import raw_from_hardness
from hf_lgelu.activation.kernels import aten, cpu

HARDNESSES = [1.0, 2.0, 20.0, 160.0]
X, DELTA = random(500, seed=19), random(500, seed=20)
T, NO_OVERRIDE = torch.tensor([0.1]), torch.zeros(1)


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


def test_a_hardness_that_is_no_number_gives_nan():
    for bits in (0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000):
        hardness = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        for dtype in (torch.float32, torch.bfloat16):
            assert bool(cpu.lambda_gate(X.to(dtype), hardness).isnan().all())
    y, _, grad_raw = learned(torch.tensor([0.0]), torch.zeros(1), NO_OVERRIDE, X, DELTA)  # a state never loaded
    assert bool(torch.cat([y, grad_raw]).isnan().all())


def test_subnormals_are_numbers_here_and_elsewhere():
    x = torch.tensor([1e-40, -1e-40, 3e-45, -3e-45])
    y, grad_x, _ = values_and_gradients(cpu.lambda_gate, x, torch.tensor([160.0]), torch.ones_like(x))
    assert torch.equal(y, F.gelu(x))
    assert grad_x.tolist() == [0.5] * 4
    # The library is not linked with -ffast-math, which would flush them to zero in the whole process.
    assert (torch.tensor([1e-40]) * 2).item() > 0


# Threads


def test_bits_do_not_depend_on_the_number_of_threads():
    x, delta, hardness = random(300, 256, seed=16), random(300, 256, seed=17), 1 + random(1, seed=18).abs()
    results = []
    for count in (1, 2, 3, 1):
        torch.set_num_threads(count)
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
    with Watching():
        assert "TorchDispatchMode" in cpu.refusal(X, one)
    with torch.autograd.forward_ad.dual_level():
        assert "forward-mode" in cpu.refusal(X, one)
    inside = []
    torch.func.vmap(lambda x: (inside.append(cpu.refusal(x, one)), x)[1])(X)
    assert "torch.func" in inside[0]


def learned(raw, temperature, override, x, delta):
    """(y, ∂x, ∂s)."""
    x, raw = x.detach().requires_grad_(), raw.detach().requires_grad_()
    y = cpu.learned_lambda_gate(x, raw, temperature, override)
    return y.detach(), *torch.autograd.grad(y, (x, raw), delta)


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


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": channels_last,
    "transposed": lambda x: x.transpose(1, 3),
    "half_of_the_last_axis": lambda x: x.chunk(2, -1)[1],
    "every_second": lambda x: x[..., ::2],
    "every_second_image": lambda x: x[::2],
    "one_channel": lambda x: x[:, 3],
    "expanded": lambda x: x[:1, :1].expand(x.shape),
    "flipped_axes": lambda x: x.permute(3, 2, 1, 0),
}
IMAGES = random(4, 12, 10, 14, seed=3)


@pytest.mark.parametrize(  # each layout with and without a δ of its own, each δ with both orders of memory
    ("layout", "of_delta", "dtype"),
    [
        *((layout, "like_x", torch.float32) for layout in LAYOUTS),
        *((layout, "contiguous", torch.bfloat16) for layout in LAYOUTS),
        *(("contiguous", of_delta, torch.float32) for of_delta in ("channels_last", "expanded_scalar")),
        *(("channels_last", of_delta, torch.bfloat16) for of_delta in ("channels_last", "expanded_scalar")),
    ],
)
def test_any_strides(layout, of_delta, dtype):
    x = LAYOUTS[layout](IMAGES.to(dtype))
    delta = random(*x.shape, seed=4, dtype=dtype)
    if of_delta == "channels_last" and x.dim() == 4:
        delta = channels_last(delta)
    elif of_delta == "expanded_scalar":
        delta = delta.flatten()[0].expand(x.shape)
    elif of_delta == "like_x":
        delta = LAYOUTS[layout](random(*IMAGES.shape, seed=5, dtype=dtype))
    rounding = 0.0 if dtype == torch.float32 else 2.0**-8
    y, grad_x, _ = check_cpu(x, torch.tensor([1.7]), delta, rounding)
    assert y.stride() == grad_x.stride() == F.gelu(x).stride()


def test_a_layout_of_more_axes_than_the_kernel_counts():
    x = random(*(4,) * 10, seed=13)[(slice(None, None, 2),) * 10]
    check_cpu(x, torch.tensor([3.0]), random(*x.shape, seed=14))


def test_an_incoming_gradient_with_its_sign_still_to_be_flipped():
    x, delta = random(50, seed=21), torch.complex(random(50, seed=22), random(50, seed=23)).conj().imag
    assert delta.is_neg()
    check_cpu(x, torch.tensor([2.0]), delta)


@pytest.mark.slow
@pytest.mark.parametrize("function", [cpu.lambda_gate, aten.lambda_gate], ids=["cpu", "aten"])
def test_more_elements_than_32_bits_count(function):
    """Takes 14 GB."""
    n = 2**31 + 1000
    x = torch.full((n,), -0.3, dtype=torch.bfloat16)
    x[-500:] = torch.linspace(-2, 2, 500, dtype=torch.bfloat16)
    hardness = torch.tensor([2.0], requires_grad=True)
    end = x[-700:].clone()
    y = function(x, hardness)
    assert torch.equal(y[-700:].detach(), function(end, hardness).detach())
    y.backward(torch.ones(1, dtype=torch.bfloat16).expand(n))
    each = oracle.derivative_in_hardness(x[:1], torch.tensor(2.0)).item()
    rest = oracle.derivative_in_hardness(x[-500:], torch.tensor(2.0)).sum().item()
    assert hardness.grad.item() == pytest.approx(each * (n - 500) + rest, rel=1e-5)
