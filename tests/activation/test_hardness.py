"""λ(s), its inverse, its target, its swap error, its initial profiles and its granularities."""

import math

import mpmath
import pytest
import torch
from mpmath import mpf
from oracle import exact_hardness, exact_value

from hf_lgelu.activation.hardness import (
    DEFAULT_TOLERANCE,
    check_init_hardness,
    check_temperature,
    hardness_for_tolerance,
    hardness_from_raw,
    raw_from_hardness,
    swap_error_bound,
)

HARDNESSES = [1 + 1e-12, 1 + 1e-6, 1.0067, 1.05, 1.5, 2.0, 3.0, 20.9, 22.0, 38.0, 160.0, 800.0, 1e4]
TEMPERATURES = [0.01, 0.1, 0.3, 1.0, 7.0]


def exact_raw(hardness: float, temperature: float) -> mpf:
    return mpf(temperature) * mpmath.log(mpmath.expm1(mpf(hardness) - 1))


def relative_error(got: float, wanted: mpf) -> float:
    return float(abs(mpf(got) - wanted) / abs(wanted))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_raw_hardness_is_the_exact_inverse(temperature):
    """Also at the ends and where the formula changes."""
    for hardness in (*HARDNESSES, 1 + 2**-52, 1 + 1e-9, 1.999999, 2.000001, 1e30):
        got, wanted = raw_from_hardness(hardness, temperature), exact_raw(hardness, temperature)
        assert relative_error(got, wanted) < 1e-14, hardness


def test_raw_hardness_uses_the_papers_temperature_by_default():
    assert raw_from_hardness(160.0) == pytest.approx(15.9, rel=1e-15)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hardness_from_raw_matches_mpmath(dtype, temperature):
    for hardness in HARDNESSES:
        raw = torch.tensor(float(exact_raw(hardness, temperature)), dtype=dtype)
        got = hardness_from_raw(raw, temperature)
        assert got.dtype == dtype
        # s/t carries its own rounding, and λ − 1 as much of it as |s/t|.
        slack = 4 * torch.finfo(dtype).eps * max(1.0, min(abs(raw.item()) / temperature, 40.0))
        assert relative_error(got.item(), exact_hardness(raw.item(), temperature)) < slack, hardness


def test_target_of_the_paper():
    assert DEFAULT_TOLERANCE == 5e-3
    assert hardness_for_tolerance() == pytest.approx(159.577, abs=5e-4)
    assert hardness_for_tolerance(5e-3) == hardness_for_tolerance()


@pytest.mark.parametrize("tolerance", [1e-6, 5e-3, 0.1, 2 / math.sqrt(2 * math.pi)])
def test_target_leaves_exactly_the_tolerance_between_gate_and_step(tolerance):
    """∫|H(x) − Φ(λx)|dx, integrated numerically, is ε."""
    hardness = mpf(hardness_for_tolerance(tolerance))
    half = mpmath.quad(lambda x: mpmath.ncdf(-hardness * x), [0, 2 / hardness, 10 / hardness, 40 / hardness])
    assert relative_error(tolerance, 2 * half) < 1e-14


@pytest.mark.parametrize("hardness", [1.0, 2.0, 40.0, 159.577])
def test_swap_error_bound_holds_and_is_attained(hardness):
    bound = swap_error_bound(hardness)
    grid = [step / 50 / hardness for step in range(-300, 301)]
    errors = [abs(exact_value(x, hardness) - max(x, 0)) for x in grid]
    assert 0.9999 * bound < max(errors) <= bound


REFUSED = {
    "temperature": (
        [check_temperature, lambda t: raw_from_hardness(2.0, t)],
        [0.0, -0.1, math.nan, math.inf, 1e-50, 1e50],
    ),
    "learnable hardness": ([check_init_hardness, raw_from_hardness], [1, 0.5, -2.0, math.nan, math.inf, 1e39]),
    "tolerance": ([hardness_for_tolerance], [0.0, -1.0, 0.8, math.nan, math.inf, 5e-324]),
    "hardness must be at least 1": ([swap_error_bound], [0.999, 0.0, -1.0, math.nan]),
}


@pytest.mark.parametrize("named", REFUSED)
def test_refusals(named):
    functions, values = REFUSED[named]
    for function in functions:
        for value in values:
            with pytest.raises(ValueError, match=named):
                function(value)
