"""The values and first derivatives of the Triton kernels against the float64 oracle, over any layout.

For a GPU; test_triton.py runs them in Triton's interpreter as well, in a process of its own.
"""

import math

import oracle
import pytest
import torch
from expectations import assert_within, values_and_gradients
from torch.nn import functional as F
from triton_expectations import (
    DEVICE,
    HALVES,
    HARDNESSES,
    INTERPRETED,
    LAYOUTS,
    MARKS,
    RAGGED,
    assert_accurate,
    one,
    sample,
)

from hf_lgelu.activation.kernels.triton.function import lambda_gate
from hf_lgelu.activation.kernels.triton.pattern import MAX_LOOPS

pytestmark = MARKS

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


@pytest.mark.parametrize("gate", ["lambda_gelu_tanh", "lambda_silu"])
@pytest.mark.parametrize("hardness", HARDNESSES)
@pytest.mark.parametrize("hardness_shape", [(1,), (70,)])
def test_the_other_gates(gate, hardness, hardness_shape):
    x, delta = 3 * sample(300, 70, seed=13), sample(300, 70, seed=14)
    each = torch.full(hardness_shape, hardness, device=DEVICE)
    assert_accurate(x, each, delta, lambda x, hardness: lambda_gate(x, hardness, gate), gate=gate)
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


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-6), (torch.bfloat16, 2**-7)])
def test_a_hardness_in_another_dtype(dtype, rounding):
    x, delta = sample(100, seed=5), sample(100, seed=6).abs()
    value, grad_x, grad_hardness = values_and_gradients(lambda_gate, x, one(2.5).to(dtype), delta)
    wanted = values_and_gradients(lambda_gate, x, one(2.5), delta)
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
    results = values_and_gradients(lambda_gate, x, one(hardness), torch.ones_like(x))
    assert all(bool(torch.isfinite(result).all()) for result in results)


@pytest.mark.parametrize("hardness", [1.0, 3e38])
def test_where_the_gate_has_closed_or_opened_it_is_relu(hardness):
    x = torch.tensor([3e38, -3e38, 1e20, -1e20, 20.0, -20.0], device=DEVICE)
    value, grad_x, grad_hardness = values_and_gradients(lambda_gate, x, one(hardness), torch.ones_like(x))
    assert torch.equal(value, F.relu(x))
    assert grad_x.tolist() == [1, 0, 1, 0, 1, 0]
    assert grad_hardness.item() == 0


def test_what_is_not_finite_behaves_as_in_gelu():
    x = torch.tensor([math.nan, math.inf, -math.inf], device=DEVICE)
    for hardness in (1.0, 160.0):
        value, grad_x, _ = values_and_gradients(lambda_gate, x, one(hardness), torch.ones_like(x))
        assert [str(v) for v in value.tolist()] == ["nan", "inf", "nan"]
        assert all(math.isnan(v) for v in grad_x.tolist())


def test_zero_stays_zero_with_slope_one_half():
    x = torch.tensor([0.0, -0.0], device=DEVICE)
    value, grad_x, grad_hardness = values_and_gradients(lambda_gate, x, one(20.0), torch.ones_like(x))
    assert value.tolist() == [0, 0]
    assert grad_x.tolist() == pytest.approx([0.5, 0.5], abs=1e-7)
    assert grad_hardness.item() == 0


def test_subnormal_input_is_halved():
    x = torch.tensor([1e-40, -1e-40], device=DEVICE)
    assert_within(lambda_gate(x, one(1.0)).cpu(), x.cpu().double() / 2, 2e-45)


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
    value = lambda_gate(x, 1 + sample(3, 1, 1).abs())
    assert value.is_contiguous(memory_format=torch.channels_last)
    (grad_x,) = torch.autograd.grad(value, x, torch.ones_like(value))
    assert grad_x.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("shape", "hardness_shape"), [((0,), (1,)), ((0, 3), (3,)), ((2, 0, 3), (1,)), ((0,), ())])
def test_empty_input(shape, hardness_shape):
    x = torch.zeros(shape, device=DEVICE)
    hardness = torch.full(hardness_shape, 2.0, device=DEVICE)
    assert torch.equal(values_and_gradients(lambda_gate, x, hardness, x)[2], torch.zeros_like(hardness))


@pytest.mark.parametrize("hardness_shape", [(), (1,)])
def test_a_zero_dimensional_input(hardness_shape):
    x, hardness = torch.tensor(-0.7, device=DEVICE), torch.full(hardness_shape, 2.0, device=DEVICE)
    value, grad_x, grad_hardness = values_and_gradients(lambda_gate, x, hardness, torch.tensor(1.3, device=DEVICE))
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
