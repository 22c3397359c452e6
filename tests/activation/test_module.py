"""LambdaGELU: its state, casts, round trips, the hardening override, and how s learns."""

import io
import math

import oracle
import pytest
import safetensors.torch
import torch
from expectations import (
    CASTS,
    COPIES,
    DELTA,
    X,
    assert_evaluates_at,
    assert_learns,
    assert_same_state,
    assert_within,
    override,
    random,
    raw_gradient,
    state_of,
)
from torch import nn

from hf_lgelu.activation.hardness import DEFAULT_INIT_HARDNESS
from hf_lgelu.activation.kernels import use_kernel
from hf_lgelu.activation.module import LambdaGELU

STATE = ["raw_hardness", "temperature", "hardness_override"]


@pytest.fixture
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


# State


@pytest.mark.parametrize("default_dtype", [torch.float32, torch.bfloat16, torch.float64], indirect=True)
def test_state_is_float32_of_shape_one_whatever_the_default_dtype(default_dtype):
    module = LambdaGELU(init_hardness=1.5, temperature=0.3)
    assert [name for name, _ in module.named_parameters()] == ["raw_hardness"]
    assert list(module.state_dict()) == STATE
    assert all(tensor.dtype == torch.float32 and tensor.shape == (1,) for tensor in module.state_dict().values())
    assert module.raw_hardness.item() == pytest.approx(0.3 * math.log(math.expm1(0.5)), rel=1e-7)
    assert module.temperature.item() == pytest.approx(0.3, rel=1e-7)
    assert module.hardness_override.item() == 0
    assert module.hardness.dtype == torch.float32
    assert module.hardness.item() == pytest.approx(1.5, rel=1e-6)


@pytest.mark.parametrize("cast", CASTS)
def test_casting_a_model_leaves_the_hardness_alone(cast):
    model = nn.Sequential(nn.Linear(5, 5), LambdaGELU(init_hardness=1.2345))
    override(model[1], 3.3)
    raw_gradient(model[1])
    before, grad_before = state_of(model[1]), model[1].raw_hardness.grad.clone()
    parameter = model[1].raw_hardness
    CASTS[cast](model)
    assert model[0].weight.dtype != torch.float32
    assert_same_state(model[1], before)
    assert model[1].raw_hardness is parameter
    assert isinstance(parameter, nn.Parameter)
    assert torch.equal(parameter.grad, grad_before)
    assert model[1].hardness.dtype == torch.float32


def test_default_hardness_and_repr():
    module = LambdaGELU()
    assert_evaluates_at(module, DEFAULT_INIT_HARDNESS)
    assert repr(module) == "LambdaGELU(init_hardness=1.05)"


@pytest.mark.parametrize("module", [LambdaGELU(True), LambdaGELU(inplace=True), LambdaGELU(False)])
def test_inplace_is_accepted_and_ignored(module):
    x = X.clone()
    assert_evaluates_at(module, DEFAULT_INIT_HARDNESS, x)
    assert torch.equal(x, X)
    assert list(module.state_dict()) == STATE


# Round trips


def through_state_dict(module):
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = LambdaGELU(init_hardness=7.0, temperature=0.9)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    return other


@pytest.mark.parametrize("keep_vars", [False, True])
def test_an_assigned_state_is_float32_too(keep_vars):
    """A step of 1e-5 would round away in bfloat16, and a target of 159.577 be 160."""
    half = {name: nn.Parameter(tensor.bfloat16()) if keep_vars and tensor.requires_grad else tensor.bfloat16()
            for name, tensor in LambdaGELU(init_hardness=3.0).state_dict(keep_vars=keep_vars).items()}  # fmt: skip
    module = LambdaGELU()
    module.load_state_dict(half, assign=True)
    assert {tensor.dtype for tensor in module.state_dict().values()} == {torch.float32}
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert isinstance(module.raw_hardness, nn.Parameter)
    assert module.raw_hardness.is_leaf
    assert module.raw_hardness.requires_grad
    before = module.raw_hardness.item()
    assert before == half["raw_hardness"].item()
    module(torch.ones(3)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=1e-5).step()
    assert module.raw_hardness.item() != before


def through_safetensors(module):
    other = LambdaGELU(init_hardness=7.0, temperature=0.9)
    other.load_state_dict(safetensors.torch.load(safetensors.torch.save(module.state_dict())))
    return other


ROUND_TRIPS = {"state_dict": through_state_dict, "safetensors": through_safetensors, **COPIES}


@pytest.mark.parametrize("hardness_override", [0.0, 42.0])
@pytest.mark.parametrize("round_trip", ROUND_TRIPS)
def test_hardness_temperature_and_override_survive(round_trip, hardness_override):
    module = LambdaGELU(init_hardness=1.7, temperature=0.3)
    override(module, hardness_override)
    other = ROUND_TRIPS[round_trip](module)
    assert_same_state(other, state_of(module))
    assert_evaluates_at(other, hardness_override or 1.7)
    # Not only now, but in how it learns on.
    override(other, 0.0)
    assert_learns(other, temperature=0.3)
    assert module.raw_hardness.grad is None


# The override of hardening


@pytest.mark.parametrize("init_hardness", [1 + 1e-6, 1.5, 160.0])
def test_while_the_override_rules_s_gets_a_gradient_of_exactly_zero(init_hardness):
    module = LambdaGELU(init_hardness=init_hardness)
    override(module, 40.0)
    gradient = raw_gradient(module, X * 0.01)
    assert gradient.tolist() == [0.0]
    assert module.hardness.tolist() == [40.0]
    assert_evaluates_at(module, 40.0)


def test_the_gradient_to_the_input_is_that_of_the_override():
    module, x = LambdaGELU(), X.clone().requires_grad_()
    override(module, 40.0)
    module(x).backward(DELTA)
    assert_within(x.grad, DELTA.double() * oracle.derivative_in_x(X, torch.tensor(40.0)), 1e-6 * DELTA.double().abs())


@pytest.mark.parametrize("kernel", ["eager", "aten", None])
@pytest.mark.parametrize("average", [0.16, 0.999])
def test_an_override_on_its_way_up_in_an_average_is_none(kernel, average):
    """What an EMA over buffers makes of 0 and 160 after a few steps: λ is the learned one, and s learns."""
    module = LambdaGELU(init_hardness=1.5)
    override(module, average)
    with use_kernel(kernel):
        assert module.hardness.tolist() == [pytest.approx(1.5)]
        assert_evaluates_at(module, 1.5)
        assert_learns(module, temperature=0.1)
        loaded = LambdaGELU(init_hardness=2.0)
        loaded.load_state_dict(module.state_dict())
        assert_evaluates_at(loaded, 1.5)
    override(module, 1.0)
    with use_kernel(kernel):
        assert_evaluates_at(module, 1.0)
        assert raw_gradient(module).tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("kernel", ["eager", "aten", None])
def test_what_works_in_place_behind_a_hardened_gate_trains_as_before(kernel, dtype):
    if kernel == "aten" and dtype == torch.float16:
        pytest.skip("half precision is of the other kernels")
    module, x = LambdaGELU(), X.to(dtype).clone().requires_grad_()
    override(module, 40.0)
    with use_kernel(kernel):
        y = module(x)
        y.mul_(2)
        y.sum().backward()
    expected = 2 * oracle.derivative_in_x(X.to(dtype), torch.tensor(40.0))
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(x.grad.double(), expected, rtol=tolerance, atol=tolerance)
    assert module.raw_hardness.grad.tolist() == [0.0]


def test_reset_lifts_the_override_and_restores_the_start():
    module = LambdaGELU(init_hardness=1.5, temperature=0.3)
    before = state_of(module)
    for tensor in module.state_dict().values():
        tensor.fill_(5.0)
    module.reset_parameters()
    assert_same_state(module, before)


# Learning


@pytest.mark.parametrize("temperature", [0.1, 0.3])
@pytest.mark.parametrize("init_hardness", [1 + 1e-6, 1.0067, 1.05, 2.0, 20.0, 160.0])
def test_gradient_of_s(init_hardness, temperature):
    module = LambdaGELU(init_hardness=init_hardness, temperature=temperature)
    # Gates as narrow as 1/λ, so that elements lie inside them.
    assert_learns(module, temperature, X / init_hardness)


# Arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"init_hardness": 1.0}, ValueError, r"λ.* > 1 .*1\.0"),
        ({"temperature": 0.0}, ValueError, r"temperature.* > 0 .*0\.0"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        LambdaGELU(**arguments)


def test_compiled_whole_once_for_every_hardness_override_and_step():
    torch.compiler.reset()
    module = LambdaGELU(init_hardness=1.5)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_evaluates_at(compiled, 1.5)
    with torch.compiler.set_stance("fail_on_recompile"):
        for hardness_override in (0.0, 3.0, 40.0, 159.577):
            override(module, hardness_override)
            assert_evaluates_at(compiled, hardness_override or 1.5)
            gradient = raw_gradient(compiled)
            assert (gradient.item() == 0) == (hardness_override > 0)
        override(module, 0.0)
        with torch.no_grad():
            module.raw_hardness.fill_(0.2)
        assert_learns(compiled, temperature=0.1)


def test_autocast_hands_on_bfloat16_and_a_float32_gradient():
    linear, module = nn.Linear(5, 7), LambdaGELU(init_hardness=1.5)
    with torch.autocast("cpu", torch.bfloat16):
        x = linear(X)
        y = module(x)
    assert x.dtype == y.dtype == torch.bfloat16
    delta = random(*y.shape, seed=4, dtype=torch.bfloat16)
    y.backward(delta)
    x, hardness = x.detach(), torch.tensor(1.5)
    terms = delta.double() * oracle.derivative_in_hardness(x, hardness) * -math.expm1(-0.5) / 0.1
    assert module.raw_hardness.grad.dtype == torch.float32
    assert_within(module.raw_hardness.grad, terms.sum(), 1e-5 * terms.abs().sum())
    assert_within(y.detach(), oracle.value(x, hardness), 2**-8 * x.double().abs())


def test_gradients_of_a_functional_call():
    module = LambdaGELU(init_hardness=3.0)
    raw = torch.tensor([0.05])

    def loss(parameters, x, delta):
        return (torch.func.functional_call(module, parameters, (x,)) * delta).sum()

    terms = oracle.derivative_in_hardness(X, oracle.hardness_of(raw, 0.1)) * oracle.hardness_rate(raw, 0.1) * DELTA
    whole = torch.func.grad(loss)({"raw_hardness": raw}, X, DELTA)["raw_hardness"]
    assert_within(whole, terms.sum(), 1e-5 * terms.abs().sum())
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))({"raw_hardness": raw}, X, DELTA)
    assert_within(per_sample["raw_hardness"][:, 0], terms.sum((1, 2)), 1e-5 * terms.abs().sum((1, 2)))


def test_a_second_derivative_is_at_the_hardness_of_the_forward_pass():
    module, x = LambdaGELU(init_hardness=1.5), X.clone().requires_grad_()
    y = module(x)
    override(module, 37.0)
    (grad_x,) = torch.autograd.grad(y, x, DELTA, create_graph=True)
    wanted = DELTA.double() * oracle.derivative_in_x(X, torch.tensor(1.5))
    assert_within(grad_x.detach(), wanted, 1e-6 * DELTA.double().abs())
