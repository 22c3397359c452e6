"""The C++ kernel over tensors of any strides, λ of any shape, and very many elements."""

import oracle
import pytest
import torch
from expectations import assert_within, check_cpu, random, values_and_gradients
from torch.nn import functional as F

from hf_lgelu.activation.kernels import aten
from hf_lgelu.activation.kernels.cpu import function as cpu


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


HARDNESS_SHAPES = [(12, 1, 1), (14,), (1, 12, 1, 1), (10, 14), (12, 10, 14), (4, 1, 1, 1), (1, 1, 1)]


@pytest.mark.parametrize("shape", HARDNESS_SHAPES)
@pytest.mark.parametrize(
    ("layout", "of_delta"), [("contiguous", "channels_last"), ("channels_last", "contiguous"), ("sliced", "contiguous")]
)
def test_one_hardness_per_channel(layout, shape, of_delta):
    x = IMAGES if layout != "sliced" else random(4, 12, 10, 28, seed=6)[..., 3:17]
    x = channels_last(x) if layout == "channels_last" else x
    delta = random(*x.shape, seed=7)
    delta = channels_last(delta) if of_delta == "channels_last" else delta
    hardness = 1 + 5 * random(*shape, seed=8).abs()
    reason = cpu.refusal(x, hardness)
    if layout == "channels_last" and shape in ((10, 14), (12, 10, 14)):
        # (H, W) are one axis of this memory, (C, H, W) are two.
        assert (reason is None) == (shape == (10, 14))
    else:
        assert reason is None
    if reason is None:
        check_cpu(x, hardness, delta)


@pytest.mark.parametrize(("rows", "channels"), [(1, 700), (3, 1500), (300, 513), (2000, 5), (70, 1)])
def test_sums_over_many_rows(rows, channels):
    x, delta = random(rows, channels, seed=9), random(rows, channels, seed=10)
    check_cpu(x, 1 + random(channels, seed=11).abs(), delta)
    check_cpu(x, 1 + random(rows, 1, seed=12).abs(), delta)


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


@pytest.mark.parametrize("value", [0.3, 0.77, 1.9])
@pytest.mark.parametrize(
    ("shape", "hardness_shape"),
    [((300_000,), (1,)), ((9000, 2, 30), (2, 1)), ((90_000, 5), (5,)), ((2, 300_000), (2, 1))],
)
def test_terms_that_are_all_alike(shape, hardness_shape, value):
    """Each addition rounds the same way then: a float32 sum over all of them is off by 1e-4 and more."""
    x, delta, hardness = torch.full(shape, value), torch.full(shape, 1 / 3), torch.full(hardness_shape, 1.3)
    _, _, grad_hardness = values_and_gradients(cpu.lambda_gate, x, hardness, delta)
    each = delta.double().flatten()[0] * oracle.derivative_in_hardness(x.flatten()[:1], torch.tensor(1.3))
    wanted = each * x.numel() / hardness.numel()
    assert_within(grad_hardness, wanted.expand(hardness_shape), 1e-5 * wanted)


@pytest.mark.parametrize(
    "reorder",
    [lambda h: h.t().contiguous().t(), lambda h: h.repeat_interleave(2, 1)[:, ::2]],
    ids=["transposed", "every_second"],
)
def test_a_hardness_in_another_order_than_x(reorder):
    x, delta = random(4, 3, 5, seed=1), random(4, 3, 5, seed=2)
    hardness = reorder(1 + random(3, 5, seed=3).abs())
    check_cpu(x, hardness, delta)
