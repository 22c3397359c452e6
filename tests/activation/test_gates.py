"""Every row of GATES: its constants, what λ = 1 is, values and derivatives of every kernel, and its module."""

import io
from dataclasses import replace

import mpmath
import oracle
import pytest
import torch
from expectations import COPIES, DELTA, X, assert_learns, assert_matches_closed_form, assert_within, random
from mpmath import mpf
from torch.nn import functional as F

import hf_lgelu
from hf_lgelu.activation.functional import lambda_gate, lambda_gelu_tanh
from hf_lgelu.activation.gates import GATES
from hf_lgelu.activation.hardness import hardness_for_tolerance, swap_error_bound
from hf_lgelu.activation.kernels import KERNELS, choose_kernel, plain
from hf_lgelu.activation.module import GATE_MODULES, LambdaGate
from hf_lgelu.models.hardening import is_hardened

KERNELS_OF = {  # those that take the gate on this machine
    gate: [name for name, kernel in KERNELS.items() if kernel.refusal(torch.zeros(1), torch.ones(1), gate) is None]
    for gate in GATES
}
FUSED = [gate for gate in GATES if "cpu" in KERNELS_OF[gate]]
TRANSFORMABLE = ["aten", "eager", "automatic"]
OTHERS = [name for name in GATES if name != "lambda_gelu"]
PLAIN = {"lambda_gelu": F.gelu, "lambda_gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "lambda_silu": F.silu}
FUNCTIONS = {
    "lambda_gelu": hf_lgelu.lambda_gelu,
    "lambda_gelu_tanh": lambda_gelu_tanh,
    "lambda_silu": hf_lgelu.lambda_silu,
}
# torch's own derivatives of the other two, which aten takes, and σ(1 − σ) in eager's autograd.
SLOPE_ACCURACY = 1.5e-6

every_gate = pytest.mark.parametrize("gate", GATES)
other_gates = pytest.mark.parametrize("gate", OTHERS)
by_each_kernel = pytest.mark.parametrize(
    ("gate", "name"), [(gate, name) for gate in GATES for name in (*KERNELS_OF[gate], "automatic")]
)


def named(name, gate):
    return lambda x, hardness: lambda_gate(x, hardness, gate, None if name == "automatic" else name)


# The table


@every_gate
def test_the_constants_are_those_of_the_formula(gate):
    step = oracle.EXACT_STEPS[gate]
    width = 2 * mpmath.quad(lambda u: step(-u), [0, 1, 2, 4, 8, 16, 32, 100])
    root = mpmath.findroot(lambda u: step(-u) - u * oracle.EXACT_DENSITIES[gate](u), 1)  # of the derivative of u·G(−u)
    assert abs(GATES[gate].width / width - 1) < 1e-15
    assert abs(GATES[gate].swap_error / (root * step(-root)) - 1) < 1e-15
    assert all(u * step(-u) < root * step(-root) for u in (root - mpf("0.01"), root + mpf("0.01")))


@pytest.mark.parametrize("name", ["lambda_mish", "gelu", ""])
def test_what_has_no_row_is_refused_with_what_there_is_instead(name):
    for ask in (
        lambda: hardness_for_tolerance(5e-3, name),
        lambda: swap_error_bound(2.0, name),
        lambda: lambda_gate(X, 2.0, name),
    ):
        with pytest.raises(ValueError, match=rf"'{name}'.*lambda_gelu.*convert_to_relu"):
            ask()


@every_gate
def test_the_step_is_symmetric(gate):
    row, v = GATES[gate], torch.linspace(0, GATES[gate].limits[1], 1001, dtype=torch.float64)
    assert_within(row.step(-v), 1 - row.step(v), torch.full_like(v, 2e-16))
    assert torch.equal(row.density(-v), row.density(v))
    for dtype in (torch.float32, torch.float64):
        limit = torch.tensor([row.limit(dtype)], dtype=dtype)
        assert (row.step(limit).item(), row.step(-limit).item()) == (1.0, 0.0)
        density = row.density(limit).item()
        assert density == 0 or density >= torch.finfo(dtype).smallest_normal


# λ = 1


def extreme_values():
    info = torch.finfo(torch.float64)
    positive = [0.0, info.tiny, 5e-324, 1e-300, 1e-8, 5.5, 8.3, 37.6, 709, 745, 1e10, 1e155, info.max]
    return torch.tensor([*positive, *(-number for number in positive), torch.inf], dtype=torch.float64)


@every_gate
@pytest.mark.parametrize("kernel", ["automatic", "aten"])
@pytest.mark.parametrize("hardness", [1.0, torch.ones(1)], ids=["number", "tensor"])
def test_in_float64_hardness_one_is_the_plain_activation_to_the_last_bit(gate, kernel, hardness):
    for x in (3 * random(1111, 9, seed=3, dtype=torch.float64), extreme_values().reshape(3, 9)):
        got = named(kernel, gate)(x, hardness)
        assert torch.equal(got.view(torch.int64), PLAIN[gate](x).view(torch.int64))
    function = FUNCTIONS.get(gate, named("automatic", gate))
    assert bool(function(torch.tensor([torch.nan], dtype=torch.float64), 1.0).isnan().all())


@every_gate
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_narrower_dtypes_hardness_one_is_the_plain_activation_rounded(gate, dtype):
    x = random(4000, seed=4, dtype=dtype, scale=3.0)
    wanted = PLAIN[gate](x.double())
    rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    for name in (name for name in KERNELS_OF[gate] if KERNELS[name].refusal(x, torch.ones(1), gate) is None):
        assert_within(named(name, gate)(x, 1.0), wanted, rounding * wanted.abs() + 5e-7 * x.double().abs() + 3e-8)


# Kernels, against mpmath and float64


POINTS = [-1e4, -8.0, -3.3, -1.0, -0.3, -1e-3, -1e-30, 0.0, 1e-3, 0.31, 0.75, 1.0, 2.2, 5.0, 9.0, 1e4]


@every_gate
@pytest.mark.parametrize("name", TRANSFORMABLE)
@pytest.mark.parametrize("hardness", [1.0, 1.7, 160.0])
def test_float64_against_mpmath(gate, name, hardness):
    for point in POINTS:
        x, one = (torch.tensor([number], dtype=torch.float64, requires_grad=True) for number in (point, hardness))
        value = named(name, gate)(x, one)
        value.backward()
        for got, exact, scale in (
            (value, oracle.exact_value(point, hardness, gate), abs(point)),
            (x.grad, oracle.exact_derivative_in_x(point, hardness, gate), 1.0),
            (one.grad, oracle.exact_derivative_in_hardness(point, hardness, gate), point**2),
        ):
            assert abs(mpf(got.item()) - exact) <= 2e-15 * scale * max(1, abs(hardness * point))


@pytest.mark.parametrize(
    ("gate", "hardness"),
    [*((gate, hardness) for gate in GATES for hardness in (1.0, 2.5, 160.0)), ("lambda_gelu", 1e4)],
)
@pytest.mark.parametrize("scale", [1e-4, 0.02, 3.0, 30.0])
def test_float32_against_float64(gate, hardness, scale):
    x, delta = random(4096, seed=5, scale=scale), random(4096, seed=6)
    for name in (*KERNELS_OF[gate], "automatic"):
        fused = name == "cpu" or (name == "automatic" and gate in FUSED)
        accuracy = 5e-7 if gate == "lambda_gelu" or fused else SLOPE_ACCURACY
        assert_matches_closed_form(
            named(name, gate), x, torch.tensor([hardness]), delta, gate=gate, slope_accuracy=accuracy
        )


@by_each_kernel
def test_what_is_not_finite_or_overflows_is_as_in_the_plain_activation(gate, name):
    function = named(name, gate)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        if name != "automatic" and KERNELS[name].refusal(X.to(dtype), torch.ones(1), gate) is not None:
            continue
        x = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40, -1e-40], dtype=dtype).requires_grad_()
        value = function(x, torch.tensor([2.0], requires_grad=True))
        wanted = PLAIN[gate](x.detach().double() * 2) / 2
        torch.testing.assert_close(value.detach(), wanted.to(dtype), equal_nan=True, rtol=1e-6, atol=1e-43)
        value.sum().backward()
        assert x.grad[:3].isnan().all()
        assert x.grad[3:].tolist() == pytest.approx([1, 0, 0.5, 0.5])
    for largest in (1e4, 3e38):
        x = torch.tensor([3e38, -3e38], requires_grad=True)
        hardness = torch.tensor([largest], requires_grad=True)
        value = function(x, hardness)
        value.sum().backward()
        assert value.tolist() == F.relu(x).tolist()
        assert x.grad.tolist() == pytest.approx([1, 0], abs=1e-30)
        assert abs(hardness.grad.item()) <= 1e-20


@pytest.mark.parametrize(  # every gate, every kernel
    ("gate", "name"), [*((gate, "aten") for gate in GATES), ("lambda_gelu", "eager"), ("lambda_gelu", "automatic")]
)
def test_higher_orders_and_transforms(gate, name):
    x = random(3, 2, seed=16, dtype=torch.float64).requires_grad_()
    hardness = (1 + random(1, seed=17, dtype=torch.float64).abs()).requires_grad_()
    function = named(name, gate)
    of_first_order = {"check_batched_grad": True, "check_batched_forward_grad": True, "check_forward_ad": True}
    torch.autograd.gradcheck(function, (x, hardness), **of_first_order)
    torch.autograd.gradgradcheck(function, (x, hardness), check_fwd_over_rev=True, check_rev_over_rev=True)
    by_row = torch.func.vmap(lambda row: function(row, hardness))(x.detach())
    assert torch.allclose(by_row, function(x.detach(), hardness), rtol=1e-12)


@every_gate
def test_the_sum_for_the_hardness_keeps_its_digits(gate):
    """A million equal terms: a float32 sum would be off by 1e-3 and more."""
    x, delta = torch.full((2**20,), 0.4), torch.full((2**20,), 0.1)
    for name in {"cpu", "aten"} & {*KERNELS_OF[gate]}:
        hardness = torch.tensor([2.0], requires_grad=True)
        named(name, gate)(x, hardness).backward(delta)
        term = oracle.derivative_in_hardness(x[:1], torch.tensor([2.0]), gate) * delta[:1].double()
        assert hardness.grad.item() == pytest.approx(2**20 * term.item(), rel=5e-6)


def test_a_row_without_a_fused_form_is_computed_by_the_others(monkeypatch):
    monkeypatch.setitem(GATES, "lambda_new", replace(GATES["lambda_silu"], name="lambda_new"))
    one = torch.tensor([2.0])
    for name in ("cpu", "traced"):
        assert KERNELS[name].refusal(X, one, "lambda_new") == "it has no formula for lambda_new"
    assert choose_kernel(X, one, None, "lambda_new").name == "aten"
    assert_within(lambda_gate(X, 2.0, "lambda_new"), oracle.value(X, one, "lambda_silu"), 5e-7 * X.double().abs())


def test_a_row_whose_step_has_heavy_tails_is_refused():
    with pytest.raises(ValueError, match="lambda_gelu"):
        replace(GATES["lambda_gelu"], width=torch.inf)


# Modules


@every_gate
def test_every_row_has_a_module_with_the_same_state(gate):
    module = GATE_MODULES[gate](init_hardness=2.0)
    assert module.row == gate
    assert isinstance(module, LambdaGate)
    assert list(module.state_dict()) == ["raw_hardness", "temperature", "hardness_override"]
    assert list(GATE_MODULES) == list(GATES)
    for given, state in hf_lgelu.LambdaGELU(init_hardness=2.0).state_dict().items():
        assert torch.equal(module.state_dict()[given], state)


@other_gates
def test_a_module_learns_hardens_and_comes_back(gate):
    module = GATE_MODULES[gate](init_hardness=1.7)
    assert_learns(module, 0.1, gate=gate)
    hf_lgelu.anneal_hardness(module, 1.0)
    target = hardness_for_tolerance(gate=gate)
    assert module.hardness.item() == pytest.approx(target, rel=1e-7)
    assert is_hardened(module)
    module.zero_grad()
    module(X).backward(DELTA)
    assert not module.raw_hardness.grad.any()
    assert_within(module(X).detach(), oracle.value(X, torch.tensor(target), gate), 1e-6 * X.double().abs())
    fresh = GATE_MODULES[gate]()
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(X), module(X))
    for make in COPIES.values():
        assert torch.equal(make(module)(X), module(X))


@every_gate
def test_traced_exported_and_recorded(gate):
    module = GATE_MODULES[gate](init_hardness=2.0)
    wanted = module(X).detach()
    traced = torch.jit.trace(module, X)
    saved = io.BytesIO()
    torch.jit.save(traced, saved)
    assert torch.allclose(torch.jit.load(io.BytesIO(saved.getvalue()))(X), wanted, atol=1e-6)
    assert torch.allclose(torch.export.export(module, (X,)).module()(X), wanted, atol=1e-6)
    assert torch.allclose(torch.fx.symbolic_trace(module)(X), wanted)


# torch.compile


@pytest.mark.kernels
@every_gate
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(gate, dtype):
    torch.compiler.reset()
    module = GATE_MODULES[gate](init_hardness=2.5)
    compiled = torch.compile(module, fullgraph=True)
    x, delta = random(700, seed=20, dtype=dtype, scale=3.0).requires_grad_(), random(700, seed=21, dtype=dtype)
    value = compiled(x)
    value.backward(delta)
    wide, hardness = x.detach(), module.hardness.detach()
    rounding = 0.0 if dtype == torch.float32 else 2.0**-8
    want, want_x = oracle.value(wide, hardness, gate), delta.double() * oracle.derivative_in_x(wide, hardness, gate)
    assert_within(value.detach(), want, rounding * want.abs() + 5e-7 * wide.double().abs())
    assert_within(x.grad, want_x, rounding * want_x.abs() + 1e-6 * delta.double().abs())
    terms = delta.double() * oracle.derivative_in_hardness(wide, hardness, gate)
    rate = oracle.hardness_rate(module.raw_hardness.detach(), 0.1)
    assert_within(module.raw_hardness.grad, terms.sum() * rate, 2e-5 * terms.abs().sum() * rate)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38])
    got, plain = torch.compile(module, fullgraph=True)(special), PLAIN[gate](2.5 * special.double()) / 2.5
    assert torch.allclose(got.detach().double(), plain, equal_nan=True, rtol=1e-6)


@pytest.mark.parametrize("gate", plain._STEPS)
def test_a_hardness_that_is_no_number_shows_in_what_is_compiled_too(gate):
    x = torch.tensor([-3.0, 0.5, 100.0], requires_grad=True)
    y = plain.traced_lambda_gate(x, torch.tensor([torch.nan]), gate)
    assert y.isnan().all()
    y.sum().backward()
    assert x.grad.isnan().all()
