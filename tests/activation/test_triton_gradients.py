"""What autograd makes of the Triton kernels, λ formed inside, the trial on first use, and what only a GPU shows.

For a GPU; test_triton.py runs them in Triton's interpreter as well, in a process of its own.
"""

import math

import oracle
import pytest
import torch
from expectations import assert_within, values_and_gradients
from triton_expectations import ACCURACY, DEVICE, INTERPRETED, LAYOUTS, MARKS, RAGGED, one, sample

from hf_lgelu.activation.kernels.triton import availability
from hf_lgelu.activation.kernels.triton.function import lambda_gate, learned_lambda_gate

pytestmark = MARKS
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")

# Gradients


@pytest.mark.parametrize("shape", [(1,), (5,)])
@pytest.mark.parametrize(("x_learns", "hardness_learns"), [(True, False), (False, True)])
def test_only_the_gradients_asked_for(shape, x_learns, hardness_learns):
    x, delta = sample(9, 5, seed=27).requires_grad_(x_learns), sample(9, 5, seed=28)
    hardness = (1 + sample(*shape, seed=29).abs()).requires_grad_(hardness_learns)
    lambda_gate(x, hardness).backward(delta)
    assert (x.grad is not None, hardness.grad is not None) == (x_learns, hardness_learns)
    _, want_x, want_hardness = values_and_gradients(lambda_gate, x, hardness, delta)
    assert torch.equal(x.grad, want_x) if x_learns else torch.equal(hardness.grad, want_hardness)


@pytest.mark.parametrize(("shape", "hardness_shape"), [((RAGGED,), (1,)), ((300, 70), (70,)), ((20, 5, 130), (5, 1))])
def test_two_runs_give_the_same_bits(shape, hardness_shape):
    x, delta, hardness = sample(*shape, seed=30), sample(*shape, seed=31), 1 + sample(*hardness_shape, seed=32).abs()
    first = values_and_gradients(lambda_gate, x, hardness, delta)
    for _ in range(1 if INTERPRETED else 20):
        again = values_and_gradients(lambda_gate, x, hardness, delta)
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
        (lambda_gate if arguments == 1 else learned_lambda_gate)(x, *state)
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in (x, *state)]


def test_a_second_derivative():
    x, hardness = sample(20, seed=33).requires_grad_(), one(2.5)
    (first,) = torch.autograd.grad(lambda_gate(x, hardness).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    u = 2.5 * x.detach().cpu().double()
    assert_within(second.cpu(), 2.5 * oracle.density(u) * (2 - u**2), 1e-5)


def test_a_second_derivative_in_the_raw_hardness():
    x, raw = sample(20, seed=34), one(0.05).requires_grad_()
    value = learned_lambda_gate(x, raw, one(0.1), one(0.0))
    (first,) = torch.autograd.grad(value.sum(), raw, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), raw)
    leaf = torch.tensor([0.05], dtype=torch.float64, requires_grad=True)
    plain = x.cpu().double() * torch.special.ndtr((1 + torch.log1p(torch.exp(leaf / 0.1))) * x.cpu().double())
    (wanted,) = torch.autograd.grad(plain.sum(), leaf, create_graph=True)
    assert_within(first.detach().cpu(), wanted.detach(), 1e-5 * wanted.detach().abs())
    assert_within(second.cpu(), torch.autograd.grad(wanted.sum(), leaf)[0], 1e-4)


def test_a_batch_of_incoming_gradients():
    x, hardness, deltas = sample(9, seed=35).requires_grad_(), one(2.5).requires_grad_(), sample(4, 9, seed=36)
    value = lambda_gate(x, hardness)
    batched = torch.autograd.grad(value, (x, hardness), deltas, retain_graph=True, is_grads_batched=True)
    for i, delta in enumerate(deltas):
        single = torch.autograd.grad(value, (x, hardness), delta, retain_graph=True)
        for got, wanted in zip(batched, single, strict=True):
            assert_within(got[i], wanted.double(), 1e-5 * (1 + wanted.abs()))


# λ formed inside


def learned(x, raw, temperature, override, delta):
    raw = one(raw).requires_grad_()
    x = x.detach().requires_grad_()
    value = learned_lambda_gate(x, raw, one(temperature), one(override))
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
    wanted, wanted_x, _ = (t.cpu() for t in values_and_gradients(lambda_gate, x, one(7.0), delta))
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
    wanted = values_and_gradients(lambda_gate, x, hardness, delta)
    graph = torch.cuda.CUDAGraph()
    static_x = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        got = values_and_gradients(lambda_gate, static_x, hardness, delta)
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
    value, grad_x, grad_hardness = values_and_gradients(lambda_gate, x, hardness, delta)
    few = values_and_gradients(lambda_gate, x[:, :1024].contiguous(), hardness, delta[:, :1024].contiguous())
    for big, small in ((value, few[0]), (grad_x, few[1])):
        for start in (0, part // 2, part - 1024):
            assert torch.equal(big[:, start : start + 1024], small)
    assert_within(grad_hardness, (few[2] * (part // 1024)).double(), 1e-4 * few[2].abs().max() * (part // 1024))
