"""LambdaGELU under torch.compile, the tracers, autocast, gradient checkpointing and torch.func."""

import math

import oracle
import torch
from expectations import DELTA, X, assert_evaluates_at, assert_learns, assert_within, override, random, raw_gradient
from torch import nn
from torch._subclasses import FakeTensorMode  # without a public name

from hf_lgelu.activation.functional import lambda_gelu
from hf_lgelu.activation.module import LambdaGELU


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


def test_tensors_without_values_pass():
    with FakeTensorMode():
        x = torch.empty(3, 4)
        for hardness in (2.0, torch.ones(1), torch.ones(4)):
            assert lambda_gelu(x, hardness).shape == (3, 4)
        assert LambdaGELU()(x).shape == (3, 4)


def test_a_second_derivative_is_at_the_hardness_of_the_forward_pass():
    module, x = LambdaGELU(init_hardness=1.5), X.clone().requires_grad_()
    y = module(x)
    override(module, 37.0)
    (grad_x,) = torch.autograd.grad(y, x, DELTA, create_graph=True)
    wanted = DELTA.double() * oracle.derivative_in_x(X, torch.tensor(1.5))
    assert_within(grad_x.detach(), wanted, 1e-6 * DELTA.double().abs())
