"""Rows of linear maps, against the maps themselves."""

import pytest
import torch
from torch import nn

from hf_lgelu.graph.maps import Geometry, choose_positions, read_affine, read_geometry
from hf_lgelu.graph.recording import Recording

PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
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


TRANSPOSED_CASES = {
    # name: (input shape, outputs, groups, kernel, stride, padding, dilation, output padding)
    "transposed 1d": ((3, 4, 9), 5, 1, (3,), (1,), (0,), (1,), (0,)),
    "transposed 1d, cut": ((2, 4, 7), 6, 1, (2,), (1,), (2,), (1,), (0,)),
    "transposed 2d, as upsampling": ((2, 6, 4, 3), 4, 1, (2, 2), (2, 2), (0, 0), (1, 1), (0, 0)),
    "transposed 2d, grouped, axes unlike": ((2, 4, 5, 4), 6, 2, (3, 4), (2, 3), (1, 2), (2, 1), (1, 2)),
    "transposed 2d, depthwise": ((2, 4, 5, 4), 4, 4, (3, 3), (2, 1), (1, 1), (1, 1), (1, 0)),
    "transposed 3d": ((1, 2, 3, 4, 2), 3, 1, (2, 3, 2), (1, 2, 2), (0, 1, 1), (1, 1, 2), (0, 1, 0)),
}


def drawn(case):
    """(input, weight, geometry, the convolution's output without bias)."""
    every = CASES | TRANSPOSED_CASES
    shape, outputs, groups, kernel, stride, padding, dilation, *more = every[case]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    options = {"groups": groups, "bias": False, "dilation": dilation, **({"output_padding": more[0]} if more else {})}
    kind = (TRANSPOSED if more else PLAIN)[len(kernel)]
    map_ = kind(shape[1], outputs, kernel, stride, padding, **options).double()
    recording = Recording(map_, [], x)
    operation = read_affine(recording.operations[-1], recording)
    return x, operation.weight_in(map_), read_geometry(operation), map_(x).detach()


def products(rows, weight, groups):
    """rows · weight.flatten(1)ᵀ group by group, with a loop over groups."""
    per_group = weight.flatten(1).chunk(groups)
    return torch.stack([rows[:, g] @ per_group[g].T for g in range(groups)], dim=1)


@pytest.mark.parametrize("case", CASES | TRANSPOSED_CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_rows_times_the_flat_weight_are_the_convolution(case):
    x, weight, geometry, y = drawn(case)
    rows = geometry.feature_rows(x)
    expected = geometry.output_rows(y)
    assert rows.shape == (y.shape[0] * y[0, 0].numel(), geometry.groups, weight[0].numel())
    torch.testing.assert_close(products(rows, weight, geometry.groups), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES | TRANSPOSED_CASES)
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
    geometry = Geometry(
        "convolution", 1, (99, 99), (1, 1), ((0, 0), (0, 0)), (1, 1)
    )  # all windows: 8.4 million of 9,801
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


class Made(nn.Module):
    """A map whose weight is what `make` makes of its parameter or buffer `w`."""

    def __init__(self, w, make, is_buffer=False):
        super().__init__()
        self.register_buffer("w", w) if is_buffer else self.register_parameter("w", nn.Parameter(w))
        self.make = make

    def forward(self, x):
        return x @ self.make(self.w).double()


MADE = {
    "product": lambda w: w * 0.25,
    "quotient": lambda w: w / 3,
    "transposed": lambda w: w.T,
    "moved and scaled": lambda w: (2 * w.view(4, 3, 2)).permute(2, 0, 1).reshape(2, 12).T.reshape(4, 6),
    "other dtype": lambda w: w.to(torch.float16).to(torch.float32),
}


@pytest.mark.parametrize("is_buffer", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_weight_that_is_computed_is_written_where_it_is_stored(make, is_buffer):
    torch.manual_seed(0)
    shape = (6, 4) if make is MADE["transposed"] else (4, 6)
    map_, x = Made(torch.randn(shape, dtype=torch.float64), make, is_buffer), torch.randn(5, 4, dtype=torch.float64)
    recording = Recording(map_, [], x)
    operation = read_affine(recording.operations[-1], recording)
    torch.testing.assert_close(x @ operation.weight_in(map_).T.double(), map_(x))
    wanted = torch.randn(6, 4, dtype=torch.float64)
    operation.write_weight(map_, wanted)
    torch.testing.assert_close(map_(x), x @ wanted.T, rtol=2e-3, atol=2e-3 if make is MADE["other dtype"] else 1e-12)


@pytest.mark.parametrize("make", [lambda w: w * w.detach().mean(), lambda w: w[:4], lambda w: w + 1, torch.tanh])
def test_a_weight_that_nothing_stored_sets_freely_is_no_map(make):
    map_, x = Made(torch.randn(4, 6, dtype=torch.float64), make), torch.randn(5, 4, dtype=torch.float64)
    recording = Recording(map_, [], x)
    assert read_affine(recording.operations[-1], recording) is None


@pytest.mark.parametrize("case", TRANSPOSED_CASES)
def test_the_weight_of_a_transposed_convolution_is_written_as_it_is_read(case):
    shape, outputs, groups, kernel, *_ = TRANSPOSED_CASES[case]
    map_ = TRANSPOSED[len(kernel)](shape[1], outputs, kernel, groups=groups)
    recording = Recording(map_, [], torch.randn(shape))
    operation, before = read_affine(recording.operations[-1], recording), map_.weight.detach().clone()
    operation.write_weight(map_, 2 * operation.weight_in(map_))
    assert torch.equal(map_.weight, 2 * before)
