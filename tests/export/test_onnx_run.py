"""The comparison of two runtimes, on arrays instead of runtimes."""

import numpy as np
import pytest
import torch

from hf_lgelu.export.onnx_run import require_parity


class Runtime:
    """Gives fixed arrays, and keeps what it was given."""

    input_names = ("x",)

    def __init__(self, *arrays):
        self.arrays = [np.array(array, dtype=np.float32) for array in arrays]

    def __call__(self, inputs):
        self.inputs = inputs
        return self.arrays


def compare(found, expected, tolerance=0.25, **inputs):
    expected = {"logits": torch.tensor(expected)}
    found = require_parity(Runtime(found), {"x": torch.ones(1), **inputs}, expected, tolerance, "here")
    return found.largest_change, found.largest_output


def test_the_largest_difference_and_output_of_all_outputs():
    runtime = Runtime([[1.0, -4.0]], [[2.0, 2.5]])
    expected = {"a": torch.tensor([[1.0, -3.5]]), "b": torch.tensor([[2.0, 2.25]])}
    inputs = {"x": torch.ones(1), "unused": torch.ones(1)}
    found = require_parity(runtime, inputs, expected, 0.25, "here")
    assert (found.largest_change, found.largest_output) == (0.5, 3.5)
    assert set(runtime.inputs) == {"x"}


def test_the_tolerance_is_relative_to_the_largest_output_or_to_one():
    assert compare([[10.0, 1.0]], [[8.0, 1.0]]) == (2.0, 8.0)
    assert compare([[0.25]], [[0.0]]) == (0.25, 0.0)
    for found, expected in ([[10.5]], [[8.0]]), ([[0.5]], [[0.0]]), ([[float("nan")]], [[0.0]]):
        with pytest.raises(RuntimeError, match=r"logits.* 0\.25 "):
            compare(found, expected)
    with pytest.raises(RuntimeError, match=r"logits.*\(1, 2\).*\(2, 1\)"):
        compare([[1.0, 1.0]], [[1.0], [1.0]])


def test_padding_alone_is_left_out():
    mask = torch.tensor([[0, 1], [1, 1]])
    expected = [[[1.0], [2.0]], [[3.0], [4.0]]]
    assert compare([[[9.0], [2.0]], [[3.0], [4.0]]], expected, attention_mask=mask) == (0.0, 4.0)
    with pytest.raises(RuntimeError, match="differs from torch by 5"):
        compare([[[1.0], [7.0]], [[3.0], [4.0]]], expected, attention_mask=mask)
    for few in (mask[:1], torch.tensor([[0, 1, 1]])):  # a class of a row is no padding, as many as there may be
        with pytest.raises(RuntimeError, match="differs from torch by 8"):
            compare([[9.0, 2.0, 3.0]], [[1.0, 2.0, 3.0]], attention_mask=few)
