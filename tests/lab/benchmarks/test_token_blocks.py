"""A text as rows of tokens."""

import torch
from lgelu_lab.benchmarks.token_blocks import TokenBlocks


def test_blocks_are_contiguous_and_the_rest_is_dropped():
    blocks = TokenBlocks.cut(torch.arange(11), 4)
    assert blocks.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(TokenBlocks.cut(torch.arange(12), 4)) == 3


def test_nothing_predicts_the_first_token_of_a_block():
    blocks = TokenBlocks.cut(torch.arange(12), 4)
    row = blocks[1]
    assert row["input_ids"].tolist() == [4, 5, 6, 7]
    assert row["labels"].tolist() == [-100, 5, 6, 7]
    assert blocks[1]["input_ids"].tolist() == [4, 5, 6, 7]  # the labels are a copy
