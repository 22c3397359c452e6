"""A data set, ready to train on: from raw splits to rows of standardized features."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lgelu_lab.benchmarks.options import DataOptions
from lgelu_lab.benchmarks.rows import TensorRows
from lgelu_lab.benchmarks.splits import choose_rows


class Rows(Protocol):
    """A torch data set in memory: rows are dictionaries of tensors, and a batch is taken with one indexing."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Tensor]: ...

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]: ...

    def to(self, device: torch.device) -> "Rows":
        """The same rows on another device."""


class Encoder(Protocol):
    """Raw rows → features, with everything it learned taken from training rows."""

    def encode(self, raw: Any) -> np.ndarray:
        """(N, F) float32."""

    def describe(self) -> dict[str, Any]:
        """What it learned, as plain JSON: enough to prepare a new row for the trained model."""


@dataclass(frozen=True)
class RawSplit:
    """One split before preprocessing: `labels` (N,) int64, and `read`, which maps row numbers to raw rows."""

    labels: np.ndarray
    read: Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class BenchmarkData:
    """The rows of one benchmark.

    `eval` is what a run is selected on: the validation part if there is one, else `test` itself.
    `eval_split` and `test_split` say in words what they are, e.g. "validation (10 % of train)".
    `label_names` is empty where there are no classes. `preprocessing` is the encoder's description of itself.
    `processor` is the tokenizer or image processor that a saved model needs beside it, if any.
    """

    train: Rows
    eval: Rows
    test: Rows
    eval_split: str
    test_split: str
    label_names: tuple[str, ...]
    preprocessing: Mapping[str, Any]
    processor: Any = None

    def to(self, device: torch.device) -> "BenchmarkData":
        """The same with every row on `device`, so that no batch has to wait for its way there."""
        return replace(self, train=self.train.to(device), eval=self.eval.to(device), test=self.test.to(device))

    @property
    def num_labels(self) -> int:
        """Classes."""
        return len(self.label_names)


def prepare(
    train: RawSplit,
    test: RawSplit,
    fit: Callable[[Any], Encoder],
    label_names: Sequence[str],
    options: DataOptions,
    test_split: str = "test",
) -> BenchmarkData:
    """Choose rows, fit the encoder on the training rows alone, and encode every part with it.

    The encoder sees exactly the rows that a run trains on: neither the validation part nor rows beyond
    `options.max_train_samples`.
    """
    chosen = choose_rows(train.labels, len(test.labels), options)
    raw_train = train.read(chosen.train)
    encoder = fit(raw_train)

    def rows(split: RawSplit, numbers: np.ndarray, raw: Any) -> TensorRows:
        labels = split.labels[numbers].astype(np.int64, copy=False)
        return TensorRows(torch.from_numpy(encoder.encode(raw)), torch.from_numpy(labels))

    train_rows = rows(train, chosen.train, raw_train)
    eval_rows = test_rows = rows(test, chosen.test, test.read(chosen.test))
    eval_split = test_split
    if chosen.validation is not None:
        eval_rows = rows(train, chosen.validation, train.read(chosen.validation))
        eval_split = f"validation ({options.validation_fraction * 100:g} % of train)"
    return BenchmarkData(
        train_rows, eval_rows, test_rows, eval_split, test_split, tuple(label_names), encoder.describe()
    )
