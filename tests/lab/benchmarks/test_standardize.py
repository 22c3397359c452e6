"""Standardized columns, against a loop over Python floats."""

import math

import numpy as np
import pytest
from lgelu_lab.benchmarks.data import Standardizer


def loop_statistics(values):
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def test_columns_equal_a_loop_even_far_from_zero():
    random = np.random.RandomState(0)
    offsets = np.array([0.0, 5.0, 1e8])
    # A spread of 1 at an offset of 1e8 is gone in float32.
    rows = random.randn(50, 3) * np.array([1.0, 1e-3, 1.0]) + offsets
    new = random.randn(4, 3) + offsets
    standardizer = Standardizer.fit(rows, per_column=True)
    encoded = standardizer.encode(new)
    assert encoded.dtype == np.float32
    for column in range(3):
        mean, deviation = loop_statistics(rows[:, column].tolist())
        expected = [(value - mean) / deviation for value in new[:, column].tolist()]
        np.testing.assert_allclose(encoded[:, column], expected, rtol=1e-6, atol=1e-7)
        assert standardizer.describe()["mean"][column] == pytest.approx(mean, rel=1e-14)
        assert standardizer.describe()["deviation"][column] == pytest.approx(deviation, rel=1e-9)


def test_a_constant_becomes_zero_even_for_rows_where_it_changes():
    rows = np.array([[0.1, 1.0], [0.1, 2.0], [0.1, 6.0]])  # the float mean of three 0.1 is not 0.1
    encoded = Standardizer.fit(rows, per_column=True).encode(np.array([[0.1, 3.0], [9.0, 3.0]]))
    assert encoded.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert Standardizer.fit(np.full((2, 2), 7, np.uint8), per_column=False).encode(np.ones((1, 2))).tolist() == [[0, 0]]
