"""Calibration inputs for a measurement: a seeded draw of a benchmark's training rows."""

from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from lgelu_lab.benchmarks.token_blocks import TokenBlocks
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.benchmarks.image_rows import ImageRows

FEWEST_SEQUENCES = 16
"""So few sequences are only taken where there are no more: rows of one sequence are not independent."""


def available_rows(data: BenchmarkData) -> int:
    """How many rows of features, images, or tokens there are to draw from."""
    return data.train.tokens.numel() if isinstance(data.train, TokenBlocks) else len(data.train)


def draw_calibration(data: BenchmarkData, rows: int, seed: int) -> Dataset[Any]:
    """`rows` training rows without replacement, all where there are fewer; a larger draw holds a smaller one.

    Of text `rows` counts tokens, in sequences of min(T, rows/16), each the beginning of a block of T. Images come as
    they are, neither cropped nor flipped.

    Raises ValueError for fewer than 32 tokens, since a sequence has at least two.
    """
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    if isinstance(data.train, TokenBlocks):
        if rows < 2 * FEWEST_SEQUENCES:
            raise ValueError(f"calibration takes at least {2 * FEWEST_SEQUENCES} tokens, got {rows}")
        tokens = data.train.tokens
        length = min(tokens.shape[1], rows // FEWEST_SEQUENCES)
        return TokenBlocks(tokens[order[: rows // length], :length])
    if isinstance(data.train, ImageRows):
        train = data.train
        plain = ImageRows(train.images, train.labels, train.mean, train.deviation, train.image_size)
        return Subset(plain, order[:rows].tolist())
    return Subset(data.train, order[:rows].tolist())
