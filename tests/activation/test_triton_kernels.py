"""The Triton kernels against the float64 oracle: on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter.

test_triton.py runs this file in the interpreter, in a process of its own.
"""

import math
import os

import oracle
import pytest
import torch
from expectations import assert_within, random, values_and_gradients
from torch.nn import functional as F

from hf_lgelu.activation.kernels.triton import availability
from hf_lgelu.activation.kernels.triton.function import lambda_gelu, learned_lambda_gelu
from hf_lgelu.activation.kernels.triton.pattern import FLAT_BLOCK, MAX_LOOPS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")

HARDNESSES = [1.0, 2.0, 20.0, 160.0]
HALVES = [torch.float16, torch.bfloat16]
RAGGED = 3 * FLAT_BLOCK + 37
ACCURACY = 5e-7


def sample(*shape, **options):
    return random(*shape, **options).to(DEVICE)


def assert_accurate(x, hardness, delta, function=lambda_gelu, rounding=0.0, smallest=0.0):
    """The issue's bounds for value, ∂x and ∂λ; `rounding` is that of the dtype of x."""
    got, got_x, got_hardness = (t.cpu() for t in values_and_gradients(function, x, hardness, delta))
    x, hardness, delta = x.cpu(), hardness.cpu(), delta.cpu()
    want, want_x = oracle.value(x, hardness), delta.double() * oracle.derivative_in_x(x, hardness)
    assert_within(got, want, rounding * want.abs() + ACCURACY * x.double().abs() + smallest)
    assert_within(got_x, want_x, rounding * want_x.abs() + ACCURACY * delta.double().abs() + smallest)
    terms = delta.double() * oracle.derivative_in_hardness(x, hardness)
    # Past |u| = 8, where u²φ is below 1e-12, float32 rounds u² too coarsely to tell φ to 1e-5.
    beyond = 1e-12 * delta.double().abs() / hardness.double().square()
    slack = (1e-5 * terms.abs() + beyond).sum_to_size(hardness.shape)
    assert_within(got_hardness, terms.sum_to_size(hardness.shape), slack)


def one(hardness):
    return torch.tensor([hardness], device=DEVICE)


# Accuracy


@pytest.mark.parametrize("hardness", HARDNESSES)
@pytest.mark.parametrize("scale", [1e-4, 0.02, 1.0, 30.0])
def test_float32(hardness, scale):
    assert_accurate(sample(RAGGED, seed=1, scale=scale), one(hardness), sample(RAGGED, seed=2))


@pytest.mark.parametrize("hardness", HARDNESSES)
@pytest.mark.parametrize("dtype", HALVES)
def test_halves_round_only_once(dtype, hardness):
    info = torch.finfo(dtype)
    # The interpreter cuts bfloat16 off instead of rounding it.
    rounding = info.eps if INTERPRETED and dtype == torch.bfloat16 else info.eps / 2
    x, delta = sample(RAGGED, seed=3, dtype=dtype), sample(RAGGED, seed=4, dtype=dtype)
    assert_accurate(x, one(hardness), delta, rounding=rounding, smallest=info.smallest_normal * info.eps)


@pytest.mark.parametrize("hardness", HARDNESSES)
def test_the_lower_tail_keeps_its_digits(hardness):
    x = torch.linspace(-12, -1, 500, device=DEVICE) / hardness
    got, exact = lambda_gelu(x, one(hardness)).cpu(), oracle.value(x.cpu(), torch.tensor(hardness))
    assert_within(got, exact, 3e-5 * exact.abs())
    gelu = F.gelu(x.cpu() * hardness) / hardness
    assert (got.double() - exact).abs().max() <= (gelu.double() - exact).abs().max()


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-6), (torch.bfloat16, 2**-7)])
def test_a_hardness_in_another_dtype(dtype, rounding):
    x, delta = sample(100, seed=5), sample(100, seed=6).abs()
    value, grad_x, grad_hardness = values_and_gradients(lambda_gelu, x, one(2.5).to(dtype), delta)
    wanted = values_and_gradients(lambda_gelu, x, one(2.5), delta)
    assert torch.equal(value, wanted[0])
    assert torch.equal(grad_x, wanted[1])
    assert_within(grad_hardness, wanted[2].double(), rounding * wanted[2].abs())


# Special values


@pytest.mark.parametrize("hardness", [*HARDNESSES, 1e4, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_no_finite_input_gives_nan(dtype, hardness):
    info = torch.finfo(dtype)
    exponents = torch.linspace(math.log10(info.smallest_normal) - 3, math.log10(info.max) - 0.01, 300)
    positive = (10.0 ** exponents.double()).to(dtype)
    x = torch.cat([positive, -positive, torch.zeros(1, dtype=dtype)]).to(DEVICE)
    results = values_and_gradients(lambda_gelu, x, one(hardness), torch.ones_like(x))
    assert all(bool(torch.isfinite(result).all()) for result in results)


@pytest.mark.parametrize("hardness", [1.0, 3e38])
def test_where_the_gate_has_closed_or_opened_it_is_relu(hardness):
    x = torch.tensor([3e38, -3e38, 1e20, -1e20, 20.0, -20.0], device=DEVICE)
    value, grad_x, grad_hardness = values_and_gradients(lambda_gelu, x, one(hardness), torch.ones_like(x))
    assert torch.equal(value, F.relu(x))
    assert grad_x.tolist() == [1, 0, 1, 0, 1, 0]
    assert grad_hardness.item() == 0


def test_what_is_not_finite_behaves_as_in_gelu():
    x = torch.tensor([math.nan, math.inf, -math.inf], device=DEVICE)
    for hardness in (1.0, 160.0):
        value, grad_x, _ = values_and_gradients(lambda_gelu, x, one(hardness), torch.ones_like(x))
        assert [str(v) for v in value.tolist()] == ["nan", "inf", "nan"]
        assert all(math.isnan(v) for v in grad_x.tolist())


def test_zero_stays_zero_with_slope_one_half():
    x = torch.tensor([0.0, -0.0], device=DEVICE)
    value, grad_x, grad_hardness = values_and_gradients(lambda_gelu, x, one(20.0), torch.ones_like(x))
    assert value.tolist() == [0, 0]
    assert grad_x.tolist() == pytest.approx([0.5, 0.5], abs=1e-7)
    assert grad_hardness.item() == 0


def test_subnormal_input_is_halved():
    x = torch.tensor([1e-40, -1e-40], device=DEVICE)
    assert_within(lambda_gelu(x, one(1.0)).cpu(), x.cpu().double() / 2, 2e-45)


# Shapes and layouts


@pytest.mark.parametrize(
    ("shape", "hardness_shape"),
    [
        ((300, 70), (70,)),
        ((2, 60, 130), (130,)),
        ((1, 3000), (3000,)),
        ((3, 5, 1500), (5, 1)),
        ((2, 130, 40), (130, 1)),
        ((70, 3, 4, 5), (3, 1, 1)),
        ((4, 3, 4, 5), (3, 4, 5)),
        ((4, 3, 5), (4, 1, 1)),
        ((2, 1, 7), (1, 1)),
        ((5,), (5,)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_hardness_per_channel(shape, hardness_shape, dtype):
    x, delta = sample(*shape, seed=7, dtype=dtype), sample(*shape, seed=8, dtype=dtype)
    hardness = 1 + sample(*hardness_shape, seed=9).abs() * 3
    info = torch.finfo(dtype)
    half = {"rounding": info.eps / 2, "smallest": info.smallest_normal * info.eps} if dtype in HALVES else {}
    assert_accurate(x, hardness, delta, **half)


# Same shape, other strides.
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "strided": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "cut": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("hardness_shape", [(1,), (3, 1, 1), (6,)])
@pytest.mark.parametrize("layout_of_delta", LAYOUTS)
@pytest.mark.parametrize("layout_of_x", LAYOUTS)
def test_any_memory_layout(layout_of_x, layout_of_delta, hardness_shape):
    x = LAYOUTS[layout_of_x](sample(2, 3, 4, 6, seed=10))
    delta = LAYOUTS[layout_of_delta](sample(2, 3, 4, 6, seed=11))
    assert_accurate(x, 1 + sample(*hardness_shape, seed=12).abs(), delta)


def test_an_expanded_incoming_gradient():
    x, delta = sample(2, 3, 4, seed=13), torch.tensor(-1.7, device=DEVICE).expand(2, 3, 4)
    assert_accurate(x, one(2.5), delta)
    assert_accurate(x, 1 + sample(3, 1, seed=14).abs(), delta)


def test_an_incoming_gradient_in_more_loops_than_the_kernels_have():
    axes = MAX_LOOPS + 1
    x = sample(*(2,) * axes, seed=15)
    delta = sample(*(2,) * axes, seed=16).permute(*reversed(range(axes)))
    assert_accurate(x, one(2.5), delta)
    assert_accurate(x, 1 + sample(2, 1, seed=17).abs(), delta)


def test_an_incoming_gradient_whose_signs_are_still_to_be_flipped():
    x, delta = sample(50, seed=18), torch.complex(sample(50, seed=19), sample(50, seed=20)).conj().imag
    assert delta.is_neg()
    assert_accurate(x, one(2.5), delta)


def test_a_hardness_with_gaps():
    hardness = (1 + sample(10, seed=21).abs())[::2]
    assert_accurate(sample(7, 5, seed=22), hardness, sample(7, 5, seed=23))


def test_channels_last_stays_channels_last():
    x = sample(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    value = lambda_gelu(x, 1 + sample(3, 1, 1).abs())
    assert value.is_contiguous(memory_format=torch.channels_last)
    (grad_x,) = torch.autograd.grad(value, x, torch.ones_like(value))
    assert grad_x.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("shape", "hardness_shape"), [((0,), (1,)), ((0, 3), (3,)), ((2, 0, 3), (1,)), ((0,), ())])
def test_empty_input(shape, hardness_shape):
    x = torch.zeros(shape, device=DEVICE)
    hardness = torch.full(hardness_shape, 2.0, device=DEVICE)
    assert torch.equal(values_and_gradients(lambda_gelu, x, hardness, x)[2], torch.zeros_like(hardness))


@pytest.mark.parametrize("hardness_shape", [(), (1,)])
def test_a_zero_dimensional_input(hardness_shape):
    x, hardness = torch.tensor(-0.7, device=DEVICE), torch.full(hardness_shape, 2.0, device=DEVICE)
    value, grad_x, grad_hardness = values_and_gradients(lambda_gelu, x, hardness, torch.tensor(1.3, device=DEVICE))
    assert value.item() == pytest.approx(float(oracle.exact_value(x.item(), 2)), rel=1e-6)
    assert grad_x.item() == pytest.approx(1.3 * float(oracle.exact_derivative_in_x(x.item(), 2)), rel=1e-5)
    assert grad_hardness.item() == pytest.approx(
        1.3 * float(oracle.exact_derivative_in_hardness(x.item(), 2)), rel=1e-5
    )


# A few pages are touched; the rest of this memory is only promised.
@pytest.mark.parametrize("hardness_shape", [(1,), (3, 1)])
def test_offsets_beyond_32_bits(hardness_shape):
    """Sizes and strides fit in 32 bits, their product does not."""
    far = 2**30 + 5
    memory = torch.empty(2 * far + 8, dtype=torch.float16, device=DEVICE)
    x = memory.as_strided((3, 8), (far, 1))
    x.copy_(sample(3, 8, seed=24))
    delta, hardness = sample(3, 8, seed=25, dtype=torch.float16), 1 + sample(*hardness_shape, seed=26).abs()
    assert_accurate(x, hardness, delta, rounding=2**-11, smallest=6e-8)


# Gradients


@pytest.mark.parametrize("shape", [(1,), (5,)])
@pytest.mark.parametrize(("x_learns", "hardness_learns"), [(True, False), (False, True)])
def test_only_the_gradients_asked_for(shape, x_learns, hardness_learns):
    x, delta = sample(9, 5, seed=27).requires_grad_(x_learns), sample(9, 5, seed=28)
    hardness = (1 + sample(*shape, seed=29).abs()).requires_grad_(hardness_learns)
    lambda_gelu(x, hardness).backward(delta)
    assert (x.grad is not None, hardness.grad is not None) == (x_learns, hardness_learns)
    _, want_x, want_hardness = values_and_gradients(lambda_gelu, x, hardness, delta)
    assert torch.equal(x.grad, want_x) if x_learns else torch.equal(hardness.grad, want_hardness)


@pytest.mark.parametrize(("shape", "hardness_shape"), [((RAGGED,), (1,)), ((300, 70), (70,)), ((20, 5, 130), (5, 1))])
def test_two_runs_give_the_same_bits(shape, hardness_shape):
    x, delta, hardness = sample(*shape, seed=30), sample(*shape, seed=31), 1 + sample(*hardness_shape, seed=32).abs()
    first = values_and_gradients(lambda_gelu, x, hardness, delta)
    for _ in range(1 if INTERPRETED else 20):
        again = values_and_gradients(lambda_gelu, x, hardness, delta)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("programs", "channels"), [(1, 1), (4097, 1), (10000, 1), (200, 130), (3, 1000)])
def test_the_second_stage_adds_up_every_program(programs, channels):
    from hf_lgelu.activation.kernels.triton import launch

    partial = sample(programs, channels, seed=47)
    hardness = 1 + sample(channels, seed=48).abs()
    got = launch._finished(partial, launch.Hardness(hardness)).cpu()
    exact, hardness = partial.cpu().double(), hardness.cpu().double()
    assert_within(got, exact.sum(0) / hardness, 1e-6 * exact.abs().sum(0) / hardness)


def test_under_an_override_the_second_stage_takes_nothing_from_what_the_first_has_not_written():
    from hf_lgelu.activation.kernels.triton import launch

    partial, state = torch.full((5, 1), math.nan, device=DEVICE), (one(0.3), one(0.1), one(7.0))
    assert launch._finished(partial, launch.Hardness(*state)).tolist() == [0]


@pytest.mark.parametrize("shape", [(1,), (5,)])
def test_what_is_not_needed_is_not_allocated(shape):
    from hf_lgelu.activation.kernels.triton import launch

    x, hardness = sample(9, 5), launch.Hardness(1 + sample(*shape).abs())
    assert launch.backward(x, x, hardness, needs_x=True, needs_hardness=False)[1] is None
    assert launch.backward(x, x, hardness, needs_x=False, needs_hardness=True)[0] is None


@pytest.mark.parametrize("arguments", [1, 3])
def test_only_x_and_what_makes_the_hardness_is_kept(arguments):
    x = sample(64, 3).requires_grad_()
    state = [one(0.3).requires_grad_(), one(0.1), one(0.0)][:arguments]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        (lambda_gelu if arguments == 1 else learned_lambda_gelu)(x, *state)
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in (x, *state)]


def test_a_second_derivative():
    x, hardness = sample(20, seed=33).requires_grad_(), one(2.5)
    (first,) = torch.autograd.grad(lambda_gelu(x, hardness).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    u = 2.5 * x.detach().cpu().double()
    assert_within(second.cpu(), 2.5 * oracle.density(u) * (2 - u**2), 1e-5)


def test_a_second_derivative_in_the_raw_hardness():
    x, raw = sample(20, seed=34), one(0.05).requires_grad_()
    value = learned_lambda_gelu(x, raw, one(0.1), one(0.0))
    (first,) = torch.autograd.grad(value.sum(), raw, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), raw)
    leaf = torch.tensor([0.05], dtype=torch.float64, requires_grad=True)
    plain = x.cpu().double() * torch.special.ndtr((1 + torch.log1p(torch.exp(leaf / 0.1))) * x.cpu().double())
    (wanted,) = torch.autograd.grad(plain.sum(), leaf, create_graph=True)
    assert_within(first.detach().cpu(), wanted.detach(), 1e-5 * wanted.detach().abs())
    assert_within(second.cpu(), torch.autograd.grad(wanted.sum(), leaf)[0], 1e-4)


def test_a_batch_of_incoming_gradients():
    x, hardness, deltas = sample(9, seed=35).requires_grad_(), one(2.5).requires_grad_(), sample(4, 9, seed=36)
    value = lambda_gelu(x, hardness)
    batched = torch.autograd.grad(value, (x, hardness), deltas, retain_graph=True, is_grads_batched=True)
    for i, delta in enumerate(deltas):
        single = torch.autograd.grad(value, (x, hardness), delta, retain_graph=True)
        for got, wanted in zip(batched, single, strict=True):
            assert_within(got[i], wanted.double(), 1e-5 * (1 + wanted.abs()))


# λ formed inside


def learned(x, raw, temperature, override, delta):
    raw = one(raw).requires_grad_()
    x = x.detach().requires_grad_()
    value = learned_lambda_gelu(x, raw, one(temperature), one(override))
    value.backward(delta)
    assert raw.grad.shape == (1,)
    return value.detach().cpu(), x.grad.cpu(), raw.grad.cpu()


@pytest.mark.parametrize("temperature", [0.1, 0.3])
@pytest.mark.parametrize("raw", [-1.0, -0.5, -0.05, 0.0, 0.2, 3.0, 15.9])
def test_a_learned_hardness(raw, temperature):
    x, delta = sample(RAGGED, seed=37), sample(RAGGED, seed=38)
    value, grad_x, grad_raw = learned(x, raw, temperature, 0.0, delta)
    x, delta, raw = x.cpu(), delta.cpu(), torch.tensor([raw])
    temperature = torch.tensor(temperature).double()
    hardness = oracle.hardness_of(raw, temperature)
    assert_within(value, oracle.value(x, hardness), ACCURACY * x.double().abs())
    wanted = delta.double() * oracle.derivative_in_x(x, hardness)
    assert_within(grad_x, wanted, ACCURACY * delta.double().abs())
    terms = delta.double() * oracle.derivative_in_hardness(x, hardness) * oracle.hardness_rate(raw, temperature)
    assert_within(grad_raw, terms.sum(), 1e-5 * terms.abs().sum())


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_raw_hardness_far_out_stands_for_one_or_for_a_line(layout):
    """softplus(±1000) must neither overflow nor give NaN."""
    x = LAYOUTS[layout](sample(2, 3, 4, 6, seed=39, scale=1e-3))
    delta, exact_x = torch.ones(2, 3, 4, 6, device=DEVICE), x.cpu().double()
    value, _, grad_raw = learned(x, -100.0, 0.1, 0.0, delta)
    assert_within(value, oracle.value(exact_x, torch.tensor(1.0)), ACCURACY * exact_x.abs())
    assert grad_raw.item() == 0
    value, _, grad_raw = learned(x, 100.0, 0.1, 0.0, delta)
    assert_within(value, oracle.value(exact_x, torch.tensor(1001.0)), ACCURACY * exact_x.abs())
    terms = 10 * oracle.derivative_in_hardness(exact_x, torch.tensor(1001.0))
    assert_within(grad_raw, terms.sum(), 1e-5 * terms.sum())


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_override_rules_and_the_raw_hardness_gets_exactly_nothing(layout):
    x, delta = sample(2, 3, 4, 6, seed=40), LAYOUTS[layout](sample(2, 3, 4, 6, seed=41))
    # Were the sum taken, this would make it NaN.
    x[0, 0, 0, 0], delta[0, 0, 0, 1] = math.nan, math.inf
    value, grad_x, grad_raw = learned(x, 0.3, 0.1, 7.0, delta)
    assert grad_raw.item() == 0
    wanted, wanted_x, _ = (t.cpu() for t in values_and_gradients(lambda_gelu, x, one(7.0), delta))
    assert torch.equal(value.nan_to_num(9), wanted.nan_to_num(9))
    assert torch.equal(grad_x.nan_to_num(9), wanted_x.nan_to_num(9))


def test_a_learned_hardness_of_a_zero_dimensional_input():
    x = torch.tensor(-0.7, device=DEVICE)
    value, _, grad_raw = learned(x, 0.3, 0.1, 0.0, torch.tensor(1.0, device=DEVICE))
    hardness = float(oracle.exact_hardness(0.3, 0.1))
    assert value.item() == pytest.approx(float(oracle.exact_value(-0.7, hardness)), rel=1e-5)
    assert grad_raw.item() != 0


# Trial on first use


def test_the_trial_finds_that_the_kernels_work():
    assert availability._trial(torch.device(DEVICE)) is None


def test_the_trial_tells_wrong_results_and_failures(monkeypatch):
    from hf_lgelu.activation.kernels.triton import launch

    device, right = torch.device(DEVICE), launch.backward

    def wrong(*arguments):
        grad_x, grad_hardness = right(*arguments)
        return grad_x, grad_hardness * 1.01

    def fails(*arguments):
        raise RuntimeError("Failed to find C compiler.\nPlease specify it.")

    monkeypatch.setattr(launch, "backward", wrong)
    assert "results differ from torch's" in availability._trial(device)
    monkeypatch.setattr(launch, "backward", fails)
    assert availability._trial(device) == "they do not run: Failed to find C compiler. Please specify it."


# What only a device can show


@on_a_gpu
def test_the_automatic_choice_takes_triton_without_waiting_for_the_device():
    from hf_lgelu import LambdaGELU
    from hf_lgelu.activation.kernels.choice import choose_kernel

    x, module = sample(4, 64, seed=42).requires_grad_(), LambdaGELU().to(DEVICE)
    assert choose_kernel(x, module.hardness).name == "triton"
    module(x).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_a_gpu
def test_in_a_cuda_graph():
    x, hardness, delta = sample(RAGGED, seed=43), one(2.5), sample(RAGGED, seed=44)
    wanted = values_and_gradients(lambda_gelu, x, hardness, delta)
    graph = torch.cuda.CUDAGraph()
    static_x = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        got = values_and_gradients(lambda_gelu, static_x, hardness, delta)
    static_x.copy_(x)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@on_a_gpu
@pytest.mark.slow
@pytest.mark.parametrize("hardness_shape", [(1,), (3, 1)])
def test_more_elements_than_32_bits_count(hardness_shape):
    """Every third is the same: the value at the end is that at the start, and ∂λ a multiple of that of a part."""
    part = 2**30
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of free device memory")
    x = sample(3, 1024, seed=45, dtype=torch.bfloat16).repeat(1, part // 1024)
    delta = torch.ones_like(x)
    hardness = 1 + sample(*hardness_shape, seed=46).abs()
    value, grad_x, grad_hardness = values_and_gradients(lambda_gelu, x, hardness, delta)
    few = values_and_gradients(lambda_gelu, x[:, :1024].contiguous(), hardness, delta[:, :1024].contiguous())
    for big, small in ((value, few[0]), (grad_x, few[1])):
        for start in (0, part // 2, part - 1024):
            assert torch.equal(big[:, start : start + 1024], small)
    assert_within(grad_hardness, (few[2] * (part // 1024)).double(), 1e-4 * few[2].abs().max() * (part // 1024))
