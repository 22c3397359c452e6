"""Names, axes and sizes of a graph's inputs, against lists written by hand."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hf_lgelu.export.onnx.onnx_inputs import axis_sizes, choose_axes, named_inputs, other_sizes, resize


class Pair(nn.Module):
    def forward(self, x, y):
        return x + y


IDS, PIXELS = torch.arange(12).view(3, 4), torch.arange(3.0).view(3, 1, 1, 1).expand(3, 2, 5, 5)


def test_inputs_are_named_after_the_arguments():
    one, two = torch.ones(1), torch.ones(2)
    assert named_inputs(Pair(), [one, two]) == {"x": one, "y": two}
    assert named_inputs(Pair(), {"y": two, "labels": one, "x": None}) == {"y": two}
    with pytest.raises(ValueError, match="names 2 arguments, got 3 inputs"):
        named_inputs(Pair(), [one, one, one])
    with pytest.raises(TypeError, match=r"got DataLoader; of a DataLoader take one batch"):
        named_inputs(Pair(), DataLoader([one, two]))
    with pytest.raises(TypeError, match="got float for 'x'"):
        named_inputs(Pair(), {"x": 1.0})
    with pytest.raises(ValueError, match="at least one tensor"):
        named_inputs(Pair(), {})


def test_batch_and_tokens_vary_unless_axes_are_given():
    inputs = {"ids": IDS, "mask": IDS > 0, "pixels": PIXELS, "one": torch.tensor(1.0)}
    tokens = {0: "batch", 1: "sequence"}
    assert choose_axes(inputs, None) == {"ids": tokens, "mask": tokens, "pixels": {0: "batch"}, "one": {}}
    assert choose_axes(inputs, {}) == {}
    assert choose_axes(inputs, {"pixels": {2: "side", 3: "side"}}) == {"pixels": {2: "side", 3: "side"}}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"x": {0: "batch"}}, "names 'x', which is no input; inputs: ids, pixels"),
        ({"ids": {2: "third"}}, "ids has 2 axes, and dynamic_axes names axis 2"),
        ({"ids": {0: "n"}, "pixels": {1: "n"}}, "axis 'n' must have one size, .* 3 in ids, 2 in pixels"),
    ],
)
def test_axes_that_do_not_fit(axes, message):
    with pytest.raises(ValueError, match=message):
        choose_axes({"ids": IDS, "pixels": PIXELS}, axes)


def test_other_sizes_shrink_all_and_let_only_the_batch_grow():
    assert other_sizes({"batch": 3, "sequence": 4}) == [{"batch": 1, "sequence": 2}, {"batch": 4, "sequence": 3}]
    assert other_sizes({"batch": 1, "sequence": 1}) == [{"batch": 2, "sequence": 2}, {"batch": 3, "sequence": 1}]
    assert other_sizes({"batch": 2}) == [{"batch": 1}, {"batch": 3}]
    assert other_sizes({}) == []


def test_rows_are_cut_or_repeated():
    inputs, axes = {"ids": IDS, "pixels": PIXELS}, {"ids": {0: "batch", 1: "sequence"}, "pixels": {0: "batch"}}
    assert axis_sizes(inputs, axes) == {"batch": 3, "sequence": 4}
    resized = resize(inputs, axes, {"batch": 5, "sequence": 2})
    assert resized["ids"].tolist() == [[0, 1], [4, 5], [8, 9], [0, 1], [4, 5]]
    assert resized["pixels"].shape == (5, 2, 5, 5)
    assert resized["pixels"][:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1]
