"""The aten kernel: pieces on the CPU, formulas over whole tensors elsewhere, and where each is taken."""

import math

import mpmath
import oracle
import pytest
import torch
from expectations import CLAMPED, LAYOUTS, assert_matches_closed_form, assert_within, random, values_and_gradients
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from hf_lgelu.activation.kernels import aten, chunked, plain

CHUNK = 64
HARDNESSES = [1.0, 2.0, 20.0, 160.0]
COUNTS = [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 3]
INF, NAN = math.inf, math.nan


@pytest.fixture
def small_chunks(monkeypatch):
    """Pieces of CHUNK elements."""
    monkeypatch.setattr(chunked, "CHUNK", CHUNK)


@pytest.fixture
def whole_forbidden(monkeypatch):
    """Nothing may fall back to formulas over whole tensors."""

    def fail(*arguments):
        raise AssertionError("the whole-tensor form was taken")

    monkeypatch.setattr(aten, "_value", fail)
    monkeypatch.setattr(aten, "gradients", fail)


@pytest.fixture
def whole(monkeypatch):
    """aten without pieces, as on an accelerator."""
    monkeypatch.setattr(aten, "opaque_refusal", lambda x, other: "not here")


def assert_accurate(x, hardness, delta):
    """But for the one rounding of a half dtype."""
    info = torch.finfo(x.dtype)
    rounding, smallest = (info.eps / 2, info.smallest_normal * info.eps / 2) if x.dtype.itemsize == 2 else (0.0, 0.0)
    return assert_matches_closed_form(aten.lambda_gate, x, hardness, delta, rounding, smallest)


# Pieces


@pytest.mark.parametrize(
    ("count", "hardness"),
    [*((count, 2.0) for count in COUNTS), *((5 * CHUNK + 3, hardness) for hardness in HARDNESSES)],
)
def test_every_piece_and_the_last_shorter_one(small_chunks, whole_forbidden, count, hardness):
    assert_accurate(random(count, seed=1), torch.tensor([hardness]), random(count, seed=2))


DENSE = ["contiguous", "channels_last", "transposed", "offset"]


@pytest.mark.parametrize(
    ("layout_of_x", "layout_of_delta"),
    [
        *((layout, layout) for layout in LAYOUTS),
        *((layout, "channels_last") for layout in LAYOUTS),
        *(("channels_last", layout) for layout in LAYOUTS),
    ],
)
def test_any_layout(small_chunks, whole_forbidden, layout_of_x, layout_of_delta):
    x = LAYOUTS[layout_of_x](random(2, 3, 8, 10, seed=7))
    delta = LAYOUTS[layout_of_delta](random(2, 3, 8, 10, seed=8))
    y, grad_x, _ = assert_accurate(x, torch.tensor([3.0]), delta)
    if layout_of_x in DENSE:
        assert y.stride() == grad_x.stride() == x.stride()


@pytest.mark.parametrize(("in_x", "in_hardness"), [(True, False), (False, True), (True, True)])
def test_nothing_of_the_callers_is_overwritten(small_chunks, in_x, in_hardness):
    x, delta, hardness = random(200, seed=9), random(200, seed=10), torch.tensor([3.0])
    before = x.clone(), delta.clone(), hardness.clone()
    aten.lambda_gate(x.requires_grad_(in_x), hardness.requires_grad_(in_hardness)).backward(delta)
    assert all(torch.equal(a, b) for a, b in zip((x, delta, hardness), before, strict=True))


@pytest.mark.parametrize(("in_x", "in_hardness"), [(True, False), (False, True)])
def test_one_gradient_alone_has_the_bits_that_it_has_beside_the_other(small_chunks, whole_forbidden, in_x, in_hardness):
    x, delta, hardness = random(200, seed=11), random(200, seed=12), torch.tensor([3.0])
    _, *both = values_and_gradients(aten.lambda_gate, x, hardness, delta)
    x, hardness = x.requires_grad_(in_x), hardness.requires_grad_(in_hardness)
    aten.lambda_gate(x, hardness).backward(delta)
    for tensor, needed, wanted in ((x, in_x, both[0]), (hardness, in_hardness, both[1])):
        assert torch.equal(tensor.grad, wanted) if needed else tensor.grad is None


# Where gelu(λx)/λ would be wrong


@pytest.mark.parametrize(
    ("values", "hardness", "position"),
    [
        ([3e38] * 2, 1.0, CHUNK),  # their sum overflows
        ([3e38, -3e38, 1e-3, 0.5, 1e-30, 0.0], 3e38, 3 * CHUNK),
    ],
)
def test_where_the_scaled_argument_overflows_the_value_is_relu(small_chunks, values, hardness, position):
    x = random(3 * CHUNK + 10, seed=17)
    x[position : position + len(values)] = torch.tensor(values)
    y, grad_x, grad_hardness = values_and_gradients(aten.lambda_gate, x, torch.tensor([hardness]), torch.ones_like(x))
    value, slope, rate = (
        torch.tensor([float(exact(number, hardness)) for number in x.tolist()], dtype=torch.float64)
        for exact in (oracle.exact_value, oracle.exact_derivative_in_x, oracle.exact_derivative_in_hardness)
    )
    assert_within(y, value, 5e-7 * x.double().abs())
    assert_within(grad_x, slope, 5e-7)
    assert grad_hardness.item() == pytest.approx(rate.sum().item(), rel=1e-5, abs=CLAMPED * len(x))


def test_a_hardness_whose_reciprocal_is_subnormal():
    x = random(256, seed=29) * 1e-30
    assert torch.set_flush_denormal(True), "not supported here"
    try:
        y = aten.lambda_gate(x, torch.tensor([3e38]))
    finally:
        torch.set_flush_denormal(False)
    assert_within(y, x.double().clamp(min=0), 5e-7 * x.double().abs())


@pytest.mark.parametrize("function", [aten.lambda_gate, plain.lambda_gate], ids=["aten", "eager"])
def test_infinity_with_a_graph_of_the_gradient_and_in_forward_mode(function):
    x, hardness = torch.tensor([INF, -INF, NAN, 1.0], requires_grad=True), torch.tensor([2.0])
    (grad_x,) = torch.autograd.grad(function(x, hardness).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad_x[3], x)
    wanted = 2 * float(mpmath.npdf(2)) * (2 - 2**2)  # λφ(u)(2 − u²)
    assert second[3].item() == pytest.approx(wanted, rel=1e-6)
    _, tangent = torch.func.jvp(lambda x: function(x, hardness), (x.detach(),), (torch.ones(4),))
    for slope in (grad_x, tangent):
        assert torch.isnan(slope).tolist() == [True, True, True, False]


# The lower tail


@pytest.mark.parametrize("function", [aten.lambda_gate, plain.lambda_gate], ids=["aten", "eager"])
@pytest.mark.parametrize("hardness", HARDNESSES)
def test_the_lower_tail_loses_no_more_than_the_cdf_in_float32(function, hardness):
    x = (torch.linspace(-5, -2, 20_001) / hardness).requires_grad_()
    y = function(x, torch.tensor([hardness]))
    (grad_x,) = torch.autograd.grad(y.sum(), x)
    x = x.detach().double()
    u, eps = hardness * x, torch.finfo(torch.float32).eps
    step, slope = oracle.cdf(u), u.abs() * oracle.density(u)
    # Φ is off by half of what erf is off: 1.5e-7 by Abramowitz and Stegun 7.1.26 and one last place near −1, 2⁻²⁴. In
    # torch's GELU, if that is oneDNN's with AVX-512, it is off by 2.9e-7. Beside it u is rounded to eps, which moves Φ
    # by |u|φ(u)·eps and u·φ(u) by some u² times as much, and so is each product.
    of_cdf = 2.0**-21 if function is aten.lambda_gate else (1.5e-7 + 2.0**-24) / 2
    of_step = of_cdf + eps * (step + 2 * slope)
    assert_within(y.detach(), x * step, x.abs() * of_step)
    assert_within(grad_x, step - slope, of_step + 2 * eps * slope * (1 + u**2))


# Whole tensors


@pytest.mark.parametrize("shape", [(1,), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_tensors(whole, shape, dtype):
    x, delta = random(2, 5, 7, seed=18, dtype=dtype), random(2, 5, 7, seed=19, dtype=dtype)
    hardness = 1 + random(*shape, seed=20).abs() * 9
    assert_accurate(x, hardness, delta)


# Memory


def peak_of_a_step(function, x, delta):
    """Largest sum of allocated bytes during forward and backward, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function(x).backward(delta)
    level = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    assert peak >= 2 * x.nbytes  # the value and the gradient: the profiler saw them
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_step_needs_no_more_memory_than_with_gelu_but_for_a_few_pieces(monkeypatch, dtype, layout):
    monkeypatch.setattr(chunked, "CHUNK", 4096)
    x = random(4, 64, 32, 32, seed=25, dtype=dtype).contiguous(memory_format=layout)
    delta = random(4, 64, 32, 32, seed=26, dtype=dtype).contiguous(memory_format=layout)
    hardness = torch.tensor([2.0], requires_grad=True)
    of_gelu = peak_of_a_step(F.gelu, x.clone().requires_grad_(), delta)
    got = peak_of_a_step(lambda x: aten.lambda_gate(x, hardness), x.requires_grad_(), delta)
    pieces = 5 if dtype == torch.float32 else 7
    assert got <= of_gelu + pieces * 4 * 4096 * torch.get_num_threads() + 1024


def test_whole_tensors_take_four_besides_the_incoming_gradient(whole):
    x, delta = random(100_000, seed=27).requires_grad_(), random(100_000, seed=28)
    hardness = torch.tensor([2.0], requires_grad=True)
    assert peak_of_a_step(lambda x: aten.lambda_gate(x, hardness), x, delta) <= 5 * x.nbytes + 1024
