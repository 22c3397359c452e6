"""Rows of linear maps, against the maps themselves."""

import pytest
import torch
import torch.nn.functional as F

from hf_lgelu.graph.maps import Geometry, choose_positions

CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CASES = {
    # name: (input shape, outputs, groups, kernel, stride, padding, dilation)
    "1d": ((3, 4, 9), 5, 1, (3,), (1,), (0,), (1,)),
    "1d strided, dilated, grouped": ((2, 6, 13), 4, 2, (3,), (2,), (3,), (2,)),
    "1d same, even kernel": ((2, 3, 8), 2, 1, (4,), (1,), "same", (1,)),
    "2d pointwise": ((2, 5, 4, 3), 7, 1, (1, 1), (1, 1), (0, 0), (1, 1)),
    "2d pointwise, strided": ((2, 5, 5, 4), 3, 1, (1, 1), (2, 2), (0, 0), (1, 1)),
    "2d axes unlike": ((2, 4, 7, 9), 6, 2, (3, 2), (2, 1), (1, 0), (1, 3)),
    "2d same, dilated": ((2, 2, 6, 5), 3, 1, (2, 3), (1, 1), "same", (3, 2)),
    "2d valid": ((1, 2, 5, 5), 3, 1, (3, 3), (2, 2), "valid", (1, 1)),
    "2d depthwise": ((2, 4, 6, 6), 4, 4, (3, 3), (1, 1), (1, 1), (1, 1)),
    "2d depthwise, two outputs a channel": ((2, 3, 5, 6), 6, 3, (3, 3), (2, 1), (1, 1), (1, 1)),
    "3d": ((2, 4, 4, 5, 6), 6, 2, (2, 3, 2), (1, 2, 2), (0, 1, 1), (2, 1, 1)),
}


def drawn(case):
    """(input, weight, geometry, the convolution's output without bias)."""
    shape, outputs, groups, kernel, stride, padding, dilation = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(outputs, shape[1] // groups, *kernel, dtype=torch.float64)
    y = CONVOLVE[len(kernel)](x, weight, None, stride, padding, dilation, groups)
    return x, weight, Geometry("convolution", groups, kernel, stride, padding, dilation), y


def products(rows, weight, groups):
    """rows · weight.flatten(1)ᵀ group by group, with a loop over groups."""
    per_group = weight.flatten(1).chunk(groups)
    return torch.stack([rows[:, g] @ per_group[g].T for g in range(groups)], dim=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_rows_times_the_flat_weight_are_the_convolution(case):
    x, weight, geometry, y = drawn(case)
    rows = geometry.feature_rows(x)
    expected = geometry.output_rows(y)
    assert rows.shape == (y.shape[0] * y[0, 0].numel(), geometry.groups, weight[0].numel())
    torch.testing.assert_close(products(rows, weight, geometry.groups), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_chosen_positions_are_each_image_s_own(case):
    x, weight, geometry, y = drawn(case)
    available = y[0, 0].numel()
    positions = torch.stack([torch.randperm(available)[: available - 1] for _ in x])
    rows = geometry.feature_rows(x, positions)
    # by hand: the outputs of an image, flat, at its positions
    flat = y.flatten(2)
    expected = torch.stack([flat[b, :, p] for b, chosen in enumerate(positions.tolist()) for p in chosen])
    expected = expected.reshape(len(rows), geometry.groups, -1)
    torch.testing.assert_close(products(rows, weight, geometry.groups), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(geometry.output_rows(y, positions), expected)


def test_only_the_chosen_windows_are_laid_out():
    x = torch.randn(1, 1, 3000, 3000)
    geometry = Geometry("convolution", 1, (99, 99), (1, 1), (0, 0), (1, 1))  # all windows: 8.4 million of 9,801
    rows = geometry.feature_rows(x, torch.tensor([[5, 2902 * 2901]]))
    assert torch.equal(rows[0, 0], x[0, 0, :99, 5:104].flatten())
    assert torch.equal(rows[1, 0], x[0, 0, 2901:, :99].flatten())


def test_an_image_has_the_same_positions_in_any_batch():
    seeds = [3, 2**63 - 1, 0, 77]
    together = choose_positions(seeds, 50, 20)
    assert together.shape == (4, 20)
    for index, seed in enumerate(seeds):
        assert torch.equal(choose_positions([seed], 50, 20)[0], together[index])
    assert len({tuple(row) for row in together.tolist()}) == 4
    for row in together.tolist():
        assert row == sorted(set(row))
        assert row[0] >= 0
        assert row[-1] < 50
