"""Rows in a DataLoader, against plain indexing."""

import torch
from lgelu_lab.benchmarks.data import FeatureRows, collate_rows
from torch.utils.data import DataLoader


def numbered_rows(count=10, start=0):
    """Row i holds (i, -i) and the label i % 3."""
    numbers = torch.arange(start, start + count)
    return FeatureRows(torch.stack([numbers, -numbers], dim=1).float(), numbers % 3)


def check_batch(batch, numbers):
    assert batch["features"].tolist() == [[float(i), float(-i)] for i in numbers]
    assert batch["labels"].tolist() == [i % 3 for i in numbers]
    assert (batch["features"].dtype, batch["labels"].dtype) == (torch.float32, torch.int64)


def test_one_row_and_many():
    rows = numbered_rows()
    assert len(rows) == 10
    assert rows[7]["features"].tolist() == [7.0, -7.0]
    assert rows[7]["labels"].item() == 1
    check_batch(rows.__getitems__([3, 0, 3]), [3, 0, 3])


def test_a_loader_gives_the_rows_in_order_with_the_last_batch_partial():
    batches = list(DataLoader(numbered_rows(), batch_size=4, collate_fn=collate_rows))
    assert len(batches) == 3
    for batch, numbers in zip(batches, ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9]), strict=True):
        check_batch(batch, numbers)
