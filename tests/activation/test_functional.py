"""`lambda_gelu` and every row of KERNELS: values, first derivatives, shapes, errors and compilation."""

import math

import oracle
import pytest
import torch
from expectations import CLAMPED, assert_matches_closed_form, assert_within, random, values_and_gradients
from torch.nn import functional as F

from hf_lgelu.activation.functional import lambda_gelu
from hf_lgelu.activation.module import LambdaGELU

HARDNESSES = [1.0, 2.0, 20.0, 160.0, 1e4]
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("hardness", HARDNESSES)
@pytest.mark.parametrize("dtype", HALVES)
def test_halves_round_only_once(function, dtype, hardness):
    """The result is the float64 result for the rounded input, rounded to the dtype: float32 inside."""
    x, delta = random(4096, seed=4, dtype=dtype), random(4096, seed=5, dtype=dtype)
    info = torch.finfo(dtype)
    rounding, smallest = info.eps / 2, info.smallest_normal * info.eps / 2
    assert_matches_closed_form(function, x, torch.tensor([hardness]), delta, rounding, smallest)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_hardness_in_half_precision_gets_a_gradient_rounded_once(function, dtype):
    x, delta, hardness = random(512, seed=6), random(512, seed=7), torch.tensor([2.5], dtype=dtype)
    grad_hardness = values_and_gradients(function, x, hardness, delta)[2]
    exact = (delta.double() * oracle.derivative_in_hardness(x, hardness)).sum()
    assert_within(grad_hardness, exact, 0.51 * torch.finfo(dtype).eps * exact.abs())


def test_dtypes_of_input_and_hardness_are_independent(function):
    x, delta = random(64, seed=8, dtype=torch.float64), random(64, seed=9, dtype=torch.float64)
    assert_matches_closed_form(function, x, torch.tensor([3.7]), delta)
    assert_matches_closed_form(function, x.float(), torch.tensor([3.7], dtype=torch.float64), delta.float())


@pytest.mark.parametrize("hardness", [1.0, 1e4, 3e38])
@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float16, 65504.0), (torch.bfloat16, 3e38), (torch.float32, 3e38)]
)
def test_finite_input_gives_finite_values_and_gradients(function, dtype, largest, hardness):
    """λx overflows; the value is still ReLU's, ∂x its step, and ∂λ vanishes."""
    x = torch.tensor([largest, -largest], dtype=dtype)
    value, grad_x, grad_hardness = values_and_gradients(function, x, torch.tensor([hardness]), torch.ones_like(x))
    assert torch.equal(value, F.relu(x))
    assert grad_x.tolist() == pytest.approx([1, 0], abs=1e-30)
    assert abs(grad_hardness.item()) <= CLAMPED


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_no_input_of_any_magnitude_gives_nan(function, dtype):
    info = torch.finfo(dtype)
    exponents = torch.linspace(math.log10(info.smallest_normal) - 3, math.log10(info.max) - 0.01, 400)
    positive = (10.0 ** exponents.double()).to(dtype)
    x = torch.cat([positive, -positive, torch.zeros(1, dtype=dtype)])
    for hardness in HARDNESSES:
        results = values_and_gradients(function, x, torch.tensor([hardness]), torch.ones_like(x))
        assert all(bool(torch.isfinite(result).all()) for result in results)


@pytest.mark.parametrize("shape", [(1,), (), (1, 1)])
def test_one_hardness_of_any_shape(function, shape):
    x, delta = random(2, 3, 4, 5, seed=10), random(2, 3, 4, 5, seed=11)
    hardness = 1 + random(*shape, seed=12).abs() * 3
    assert_matches_closed_form(function, x, hardness, delta)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_an_input_without_dimensions_takes_one_hardness_of_any_shape(shape):
    x = torch.tensor(0.7)
    for kernel in (None, "aten", "eager"):
        value = lambda_gelu(x, torch.full(shape, 2.0), kernel=kernel)
        assert value.shape == ()
        assert_within(value, oracle.value(x, torch.tensor(2.0)), 1e-6)
    by_element = torch.func.vmap(LambdaGELU(init_hardness=2.0))(x.expand(3)).detach()
    assert_within(by_element, oracle.value(x.expand(3), torch.tensor(2.0)), 1e-6)


@pytest.mark.parametrize(("x_shape", "hardness_shape"), [((0,), (1,)), ((2, 0, 3), (1,)), ((0,), ())])
def test_empty_input(function, x_shape, hardness_shape):
    x = torch.zeros(x_shape)
    grad_hardness = values_and_gradients(function, x, torch.full(hardness_shape, 2.0), torch.zeros(x_shape))[2]
    assert torch.equal(grad_hardness, torch.zeros(hardness_shape))


# Arguments


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
@pytest.mark.parametrize("number", [1, 1.0, 2.53, 160])
def test_a_number_is_one_hardness_for_all(dtype, number):
    x = random(2, 300, seed=22, dtype=dtype)
    value = lambda_gelu(x, number)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert value.dtype == dtype
    assert torch.equal(value, lambda_gelu(x, torch.tensor([number], dtype=wide)))
    assert_within(value, oracle.value(x, torch.tensor(number)), torch.finfo(dtype).eps * x.double().abs() + 6e-8)


@pytest.mark.parametrize("hardness", [0.999, 0.0, -3.0, math.nan, math.inf, -math.inf, 1e39])
def test_a_hardness_below_one_or_not_finite_is_refused(hardness):
    message = r"hardness must be at least 1 \(1 is GELU\) and finite in torch\.float32, got"
    with pytest.raises(ValueError, match=message):
        lambda_gelu(torch.ones(2), hardness)
    with pytest.raises(ValueError, match=message):
        lambda_gelu(torch.ones(2), torch.tensor([hardness], dtype=torch.float64))


def test_a_number_is_checked_and_used_without_reading_the_device():
    """The meta device has no values to read, as an accelerator has none to read without waiting."""
    x = torch.empty(3, device="meta")
    assert lambda_gelu(x, 2.0).device.type == "meta"
    assert lambda_gelu(x, torch.empty(1, device="meta")).shape == (3,)
    with pytest.raises(ValueError, match=r"hardness.*0\.5"):
        lambda_gelu(x, 0.5)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 3), (0,)])
def test_several_hardnesses_are_refused(shape):
    with pytest.raises(ValueError, match=r"λ.*shape"):
        lambda_gelu(torch.ones(2, 3), torch.ones(shape))
