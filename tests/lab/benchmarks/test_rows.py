"""Rows in a DataLoader and in Trainer, against plain indexing."""

from itertools import chain

import pytest
import torch
from lgelu_lab.benchmarks.data import FeatureRows, collate_rows
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from hf_lgelu.models.mlp import MLPConfig, MLPForClassification


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


def test_a_loader_never_takes_single_rows(monkeypatch):
    monkeypatch.setattr(FeatureRows, "__getitem__", lambda *_: pytest.fail("a row was taken on its own"))
    assert len(list(DataLoader(numbered_rows(), batch_size=3, collate_fn=collate_rows))) == 4


class BatchLog(Trainer):
    """Keeps the features and labels of every training batch."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.batches = [*getattr(self, "batches", []), {name: value.clone() for name, value in inputs.items()}]
        return super().training_step(model, inputs, *args, **kwargs)


def test_trainer_sees_every_row_once_an_epoch_in_a_new_order(tmp_path):
    model = MLPForClassification(
        MLPConfig(num_features=2, hidden_size=4, num_hidden_layers=1, num_labels=3, hidden_act="relu")
    )
    arguments = TrainingArguments(
        tmp_path,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = numbered_rows()
    trainer = BatchLog(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate_rows)
    trainer.train()
    numbers = [[int(i) for i in batch["features"][:, 0]] for batch in trainer.batches]
    for batch, order in zip(trainer.batches, numbers, strict=True):
        check_batch(batch, order)
    assert [len(order) for order in numbers] == [4, 4, 2] * 2
    first, second = (list(chain.from_iterable(epoch)) for epoch in (numbers[:3], numbers[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert len({tuple(first), tuple(second), tuple(range(10))}) == 3
    assert trainer.predict(rows).label_ids.tolist() == [i % 3 for i in range(10)]
