"""The draws of calibration rows: distinct training rows, a larger draw around a smaller, tokens in short sequences."""

from types import SimpleNamespace

import pytest
import torch
from lgelu_lab.benchmarks.data import FeatureRows
from lgelu_lab.benchmarks.token_blocks import TokenBlocks
from lgelu_lab.measurements.networks import available_rows, draw_calibration


def data_of(train):
    return SimpleNamespace(train=train)


def test_rows_are_drawn_without_replacement_and_a_larger_draw_holds_a_smaller():
    data = data_of(FeatureRows(torch.arange(40.0)[:, None], torch.zeros(40, dtype=torch.int64)))
    few, many = ([int(row["features"]) for row in draw_calibration(data, rows, 5)] for rows in (10, 30))
    assert many[:10] == few
    assert len(set(many)) == 30
    assert few != list(range(10))
    assert [int(row["features"]) for row in draw_calibration(data, 10, 6)] != few
    assert available_rows(data) == len(draw_calibration(data, 1000, 5)) == 40


@pytest.mark.parametrize(("rows", "shape"), [(64, (16, 4)), (256, (16, 16)), (512, (32, 16)), (10_000, (50, 16))])
def test_tokens_are_counted_and_sequences_begin_where_blocks_begin(rows, shape):
    blocks = torch.arange(50 * 16).view(50, 16)
    data = data_of(TokenBlocks(blocks))
    drawn = draw_calibration(data, rows, 0).tokens
    assert tuple(drawn.shape) == shape
    numbers = drawn[:, 0] // 16
    assert len(set(numbers.tolist())) == shape[0]
    assert torch.equal(drawn, blocks[numbers, : shape[1]])
    assert available_rows(data) == 800


def test_too_few_tokens_for_sequences_are_refused():
    with pytest.raises(ValueError, match="32 tokens, got 31"):
        draw_calibration(data_of(TokenBlocks(torch.zeros(9, 8, dtype=torch.int64))), 31, 0)
