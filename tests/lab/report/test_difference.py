"""Intervals of differences, against tables of statistics and a plain inversion."""

import math

import pandas as pd
import pytest
from lgelu_lab.report.difference import difference_of, newcombe, student
from lgelu_lab.report.numbers import wilson


def of(first, second, metric="accuracy", samples=None):
    return difference_of(pd.Series(first, dtype=float), pd.Series(second, dtype=float), metric, samples)


def test_several_seeds_have_students_interval():
    values = (-0.0029, -0.0031, -0.0034)
    mean = sum(values) / 3
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / 2)
    low, high = student(values)
    assert (low + high) / 2 == pytest.approx(mean)
    assert (high - low) / 2 == pytest.approx(4.302653 * deviation / math.sqrt(3), rel=1e-6)  # t of 2 degrees of freedom


def test_one_seed_has_newcombes_interval_of_two_shares():
    # His first example: 56 of 70 and 48 of 80, 0.2000 (0.0524 to 0.3339); each share has its own number of rows there.
    one, other = wilson(56 / 70, 70), wilson(48 / 80, 80)
    assert 0.2 - math.hypot(0.8 - one[0], other[1] - 0.6) == pytest.approx(0.0524, abs=5e-5)
    low, high = newcombe("accuracy", 0.8, 0.6, 100)
    one, other = wilson(0.8, 100), wilson(0.6, 100)
    assert low == pytest.approx(0.2 - math.sqrt((0.8 - one[0]) ** 2 + (other[1] - 0.6) ** 2))
    assert high == pytest.approx(0.2 + math.sqrt((one[1] - 0.8) ** 2 + (0.6 - other[0]) ** 2))
    assert newcombe("perplexity", 30.0, 31.0, 100) is None


def test_pairs_without_one_side_are_left_out():
    difference = of([0.5, None, 0.75], [0.25, 0.5, None])
    assert difference.values == (0.25,)
    assert str(difference) == "+0.2500"
    assert of([None], [0.5]) is None
    assert str(of([0.5, 0.75], [0.25, 0.5])) == "+0.2500 (+0.2500 to +0.2500)"
