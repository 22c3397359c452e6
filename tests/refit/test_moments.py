"""Sums over rows, against float64 sums over all rows at once."""

import pytest
import torch

from hf_lgelu.environment import matmul_backends
from hf_lgelu.refit import moments as module
from hf_lgelu.refit.moments import Moments

GROUPS, WIDTH, OUTPUTS = 2, 5, 3


def drawn(rows, seed=0, dtype=torch.float64, offset=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, GROUPS, WIDTH, generator=generator, dtype=torch.float64) + offset
    r, t = (torch.randn(rows, GROUPS, OUTPUTS, generator=generator, dtype=torch.float64) + 0.5 for _ in range(2))
    return tuple(values.to(dtype) for values in (x, r, 3 * t))


def sums(features, residuals, originals):
    """What the fields mean, over all rows at once."""
    x, r, t = (values.double() for values in (features, residuals, originals))
    return {
        "feature_sum": x.sum(0), "residual_sum": r.sum(0), "original_sum": t.sum(0),
        "gram": torch.einsum("ngi,ngj->gij", x, x), "cross": torch.einsum("ngi,ngj->gij", x, r),
        "residual_square": r.square().sum(0), "original_square": t.square().sum(0),
    }  # fmt: skip


def of(*rows, weights=None):
    result = Moments.zeros(GROUPS, WIDTH, OUTPUTS)
    result.add(*rows, weights)
    return result


def assert_equal(moments, expected, rtol=1e-12):
    for name, value in expected.items():
        given = getattr(moments, name)
        assert given.dtype == torch.float64
        torch.testing.assert_close(given, value, rtol=rtol, atol=rtol * float(value.abs().max()), msg=name)


def test_more_rows_than_one_product_takes(monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 16)
    rows = drawn(45)
    moments = of(*rows)
    assert moments.count == 45
    assert_equal(moments, sums(*rows))
    rows = drawn(45, dtype=torch.float32)
    cut = Moments.zeros(GROUPS, WIDTH, OUTPUTS)
    for part in zip(*(values.split(16) for values in rows), strict=True):
        cut.add(*part)
    assert torch.equal(of(*rows).gram, cut.gram)
    monkeypatch.setattr(module, "_ROWS", 45)
    assert not torch.equal(of(*rows).gram, cut.gram)  # float32 rounds otherwise


@pytest.mark.parametrize("block", [1, 2, 4])
def test_a_wide_product_is_taken_block_by_block(monkeypatch, block):
    monkeypatch.setattr(module, "_BLOCK", block)
    rows = drawn(30)
    assert_equal(of(*rows), sums(*rows))


def test_rows_masked_out_do_not_count_whatever_they_hold():
    x, r, t = drawn(30)
    weights = torch.arange(30) % 3 > 0
    expected = sums(x[weights], r[weights], t[weights])
    for values in (x, r, t):
        values[~weights] = float("nan")
    moments = of(x, r, t, weights=weights)
    assert moments.count == 20
    assert_equal(moments, expected)
    moments.add(x, r, t, torch.zeros(30, dtype=torch.bool))
    assert moments.count == 20
    assert_equal(moments, expected)


# At 1e5 a float32 is known to 0.004: its rounding is shared by all rows, and so is the error of the products.
@pytest.mark.parametrize(("offset", "tolerance"), [(0.0, 3e-6), (1e3, 3e-6), (1e5, 3e-5)])
def test_float32_rows_are_summed_around_their_mean(offset, tolerance):
    rows = drawn(2000, dtype=torch.float32, offset=offset)
    moments = of(*rows)
    x, r = rows[0].double(), rows[1].double()
    deviations = x - x.mean(0)
    gram = torch.einsum("ngi,ngj->gij", deviations, deviations)
    cross = torch.einsum("ngi,ngj->gij", deviations, r - r.mean(0))
    mean = moments.feature_sum / 2000
    around_mean = moments.gram - 2000 * mean[:, :, None] * mean[:, None, :]
    torch.testing.assert_close(around_mean, gram, rtol=0, atol=tolerance * float(gram.max()))
    around_mean = moments.cross - mean[:, :, None] * moments.residual_sum[:, None, :]
    torch.testing.assert_close(around_mean, cross, rtol=0, atol=tolerance * float(gram.max()))
    torch.testing.assert_close(moments.feature_sum, x.sum(0), rtol=1e-11, atol=1e-4)
    squares = {"residual_square": r.square().sum(0), "original_square": rows[2].double().square().sum(0)}
    assert_equal(moments, squares)


def _precisions():
    """What PyTorch's two ways to name it say of float32 products."""
    try:
        overall = torch.get_float32_matmul_precision()
    except RuntimeError:
        overall = "contradictory"
    return overall, *[backend.fp32_precision for backend in matmul_backends()]


def _forget_precisions():
    torch.set_float32_matmul_precision("highest")
    for backend in matmul_backends():
        backend.fp32_precision = "none"


def _old_way():
    torch.set_float32_matmul_precision("medium")
    return "medium", "tf32", "bf16"


def _new_way():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    return "contradictory", "tf32", "none"


@pytest.mark.parametrize(
    "choose", [_old_way, pytest.param(_new_way, marks=pytest.mark.skipif(not matmul_backends(), reason="torch 2.8"))]
)
def test_products_stay_float32_under_autocast_and_a_lower_precision(choose):
    rows = drawn(500, dtype=torch.float32)
    expected = of(*rows)
    _forget_precisions()
    try:
        chosen = choose()[: 1 + len(matmul_backends())]
        assert _precisions() == chosen
        with torch.autocast("cpu", dtype=torch.bfloat16):
            moments = of(*rows)
        assert _precisions() == chosen
        with module._full_precision(torch.device("cpu")):
            assert set(_precisions()) <= {"highest", "ieee"}
    finally:
        _forget_precisions()
    assert torch.equal(moments.gram, expected.gram)
    assert torch.equal(moments.cross, expected.cross)


def test_sums_that_overflow_are_noticed():
    rows = drawn(10, dtype=torch.float32)
    assert of(*rows).is_finite()
    rows[0][:, 0, 0] = torch.linspace(-1e30, 1e30, 10)
    assert not of(*rows).is_finite()
