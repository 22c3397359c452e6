"""A text as rows of tokens."""

import pytest
import torch
from lgelu_lab.benchmarks.data import collate_rows
from lgelu_lab.benchmarks.token_blocks import TokenBlocks
from torch.utils.data import DataLoader


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


def test_a_loader_takes_a_batch_with_one_indexing(monkeypatch):
    blocks = TokenBlocks.cut(torch.arange(20), 4)
    monkeypatch.setattr(TokenBlocks, "__getitem__", lambda *_: pytest.fail("took one row"))
    loader = DataLoader(blocks, batch_size=2, sampler=[3, 0, 2], collate_fn=collate_rows)
    first, last = list(loader)
    assert first["input_ids"].tolist() == [[12, 13, 14, 15], [0, 1, 2, 3]]
    assert first["labels"].tolist() == [[-100, 13, 14, 15], [-100, 1, 2, 3]]
    assert last["labels"].tolist() == [[-100, 9, 10, 11]]
