"""The Triton kernel against the float64 oracle: values, derivatives, λ formed inside, the trial on first use.

For a GPU; test_triton.py runs it in Triton's interpreter, in a process of its own.
"""

import math
import os

import oracle
import pytest
import torch
from expectations import LAYOUTS, assert_within, random, values_and_gradients
from torch.nn import functional as F

triton = pytest.importorskip("hf_lgelu.activation.kernels.triton", exc_type=ImportError)
lambda_gate, learned_lambda_gate = triton.lambda_gate, triton.learned_lambda_gate

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

HARDNESSES = [1.0, 2.0, 20.0, 160.0]
HALVES = [torch.float16, torch.bfloat16]
RAGGED = 3 * triton.BLOCK + 37
ACCURACY = 5e-7


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


@pytest.mark.parametrize("gate", ["lambda_gelu", "lambda_gelu_tanh", "lambda_silu"])
@pytest.mark.parametrize("hardness", HARDNESSES)
def test_each_gate_and_what_is_not_finite(gate, hardness):
    x, delta = 3 * sample(300, 70, seed=13), sample(300, 70, seed=14)
    assert_accurate(x, one(hardness), delta, lambda x, hardness: lambda_gate(x, hardness, gate), gate=gate)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 0.0], device=DEVICE)
    value, grad_x, _ = values_and_gradients(
        lambda x, hardness: lambda_gate(x, hardness, gate), special, one(hardness), torch.ones_like(special)
    )
    assert torch.equal(value[[0, 3, 4, 5]].cpu(), torch.tensor([torch.inf, 3e38, 0.0, 0.0]))
    assert value[1:3].isnan().all()
    assert grad_x[:3].isnan().all()
    assert grad_x[3:].tolist() == [1.0, 0.0, 0.5]


@pytest.mark.parametrize("hardness", HARDNESSES)
def test_the_lower_tail_keeps_its_digits(hardness):
    x = torch.linspace(-12, -1, 500, device=DEVICE) / hardness
    got, exact = lambda_gate(x, one(hardness)).cpu(), oracle.value(x.cpu(), torch.tensor(hardness))
    assert_within(got, exact, 3e-5 * exact.abs())
    gelu = F.gelu(x.cpu() * hardness) / hardness
    assert (got.double() - exact).abs().max() <= (gelu.double() - exact).abs().max()


@pytest.mark.parametrize("hardness", [*HARDNESSES, 1e4, 3e38])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_no_finite_input_gives_nan(dtype, hardness):
    info = torch.finfo(dtype)
    exponents = torch.linspace(math.log10(info.smallest_normal) - 3, math.log10(info.max) - 0.01, 300)
    positive = (10.0 ** exponents.double()).to(dtype)
    x = torch.cat([positive, -positive, torch.zeros(1, dtype=dtype)]).to(DEVICE)
    results = values_and_gradients(lambda_gate, x, one(hardness), torch.ones_like(x))
    assert all(bool(torch.isfinite(result).all()) for result in results)


@pytest.mark.parametrize("hardness", [1.0, 3e38])
def test_where_the_gate_has_closed_or_opened_it_is_relu(hardness):
    x = torch.tensor([3e38, -3e38, 1e20, -1e20, 20.0, -20.0], device=DEVICE)
    value, grad_x, grad_hardness = values_and_gradients(lambda_gate, x, one(hardness), torch.ones_like(x))
    assert torch.equal(value, F.relu(x))
    assert grad_x.tolist() == [1, 0, 1, 0, 1, 0]
    assert grad_hardness.item() == 0


@pytest.mark.parametrize("layout_of_delta", LAYOUTS)
@pytest.mark.parametrize("layout_of_x", LAYOUTS)
def test_any_memory_layout(layout_of_x, layout_of_delta):
    x = LAYOUTS[layout_of_x](sample(2, 3, 4, 6, seed=10))
    delta = LAYOUTS[layout_of_delta](sample(2, 3, 4, 6, seed=11))
    assert_accurate(x, one(2.5), delta)
    assert lambda_gate(x, one(2.5)).stride() == F.gelu(x).stride()


def test_empty_input():
    x, hardness = torch.zeros(2, 0, 3, device=DEVICE), one(2.0)
    assert torch.equal(values_and_gradients(lambda_gate, x, hardness, x)[2], torch.zeros_like(hardness))


def test_two_runs_give_the_same_bits():
    x, delta, hardness = sample(RAGGED, seed=30), sample(RAGGED, seed=31), one(2.5)
    first = values_and_gradients(lambda_gate, x, hardness, delta)
    for _ in range(1 if INTERPRETED else 20):
        again = values_and_gradients(lambda_gate, x, hardness, delta)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("arguments", [1, 3])
def test_only_x_and_what_makes_the_hardness_is_kept(arguments):
    x = sample(64, 3).requires_grad_()
    state = [one(0.3).requires_grad_(), one(0.1), one(0.0)][:arguments]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        (lambda_gate if arguments == 1 else learned_lambda_gate)(x, *state)
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in (x, *state)]


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


def test_the_trial_tells_wrong_results_and_failures(monkeypatch):
    device = torch.device(DEVICE)
    assert triton._trial(device) is None

    def wrong(x, hardness):
        return 1.01 * right(x, hardness)

    def fails(*arguments):
        raise RuntimeError("Failed to find C compiler.\nPlease specify it.")

    right = lambda_gate
    monkeypatch.setattr(triton, "lambda_gate", wrong)
    assert "results differ from torch's" in triton._trial(device)
    monkeypatch.setattr(triton, "lambda_gate", fails)
    assert triton._trial(device) == "they do not run: Failed to find C compiler. Please specify it."
