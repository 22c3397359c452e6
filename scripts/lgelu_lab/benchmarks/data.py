"""A data set, ready to train on: what a user chooses, which rows are taken, and rows of standardized features."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lgelu_lab.benchmarks.source import Origin


@dataclass(frozen=True)
class DataOptions:
    """Where the data lies, and which part of it is used.

    Args:
        data_dir: a folder of data set folders. None takes the environment variable LGELU_DATA_DIR,
            and without that the Hugging Face Hub.
        max_train_samples: at most this many training rows, the first of a seeded permutation.
        max_eval_samples: the same for the rows that a run is evaluated on.
        split_seed: of every choice of rows. It is not the seed of the run.

    Raises ValueError for a value that is out of range.
    """

    data_dir: str | os.PathLike[str] | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    split_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_train_samples", "max_eval_samples"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1, got {limit}; None uses every row")


@dataclass(frozen=True)
class ModelOptions:
    """Which model of its family a benchmark trains; a benchmark takes some of these (`Benchmark.model_defaults`).

    Args:
        pretrained: folder or Hub id of a checkpoint to fine-tune; None trains from scratch.
        image_size: height and width in pixels that images are resized to.
        patch_size: height and width of a vision transformer's patches, in pixels.
        num_layers: blocks.
        width: units of the residual stream.
        num_heads: attention heads; divides `width`.
        context_length: tokens in one row of text.
        vocabulary_size: tokens of the tokenizer that is trained on the corpus.
    """

    pretrained: str | None = None
    image_size: int | None = None
    patch_size: int | None = None
    num_layers: int | None = None
    width: int | None = None
    num_heads: int | None = None
    context_length: int | None = None
    vocabulary_size: int | None = None


def choose_rows(train_size: int, eval_size: int, options: DataOptions) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of the split that trains and of the one that is evaluated on, within the limits on their counts."""
    limits = (options.max_train_samples, options.max_eval_samples)
    return tuple(
        np.arange(size)
        if limit is None or limit >= size
        else np.random.RandomState(options.split_seed).permutation(size)[:limit]
        for size, limit in zip((train_size, eval_size), limits, strict=True)
    )


def stratified_holdout(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers (kept, held out), ascending; of each class, `fraction` of its rows, rounded, is held out.

    Args:
        labels: (N,), integers.
        fraction: in (0, 1).
        seed: of the permutation within each class.
    """
    # numpy promises that RandomState's stream never changes, and promises no such thing of default_rng.
    random = np.random.RandomState(seed)
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        held_out[rows[: round(fraction * len(rows))]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


@dataclass(frozen=True)
class Standardizer:
    """(x − mean) / standard deviation (population, divided by N); a constant becomes 0 everywhere.

    `mean` and `deviation` are float64, of shape (F,) for a statistic a column or () for one overall.
    """

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def fit(cls, rows: np.ndarray, *, per_column: bool) -> "Standardizer":
        """Take the statistics of (N, F) numbers: of each column, or of all of them together."""
        axis = 0 if per_column else None
        mean = np.mean(rows, axis=axis, dtype=np.float64)
        deviation = np.std(rows, axis=axis, dtype=np.float64)
        # Of a constant like 0.1 the rounded mean is not exact, and the deviation comes out near 1e-17.
        constant = np.min(rows, axis=axis) == np.max(rows, axis=axis)
        return cls(np.asarray(mean), np.where(constant, 0.0, deviation))

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """(N, F) numbers → (N, F) float32."""
        # float64 only where a column needs it: fnlwgt's 1e6 minus its mean would lose digits in float32.
        working = np.float32 if rows.dtype == np.uint8 else np.float64
        scale = np.divide(1.0, self.deviation, out=np.zeros_like(self.deviation), where=self.deviation > 0)
        standardized = rows.astype(working)
        standardized -= self.mean.astype(working)
        standardized *= scale.astype(working)
        return standardized.astype(np.float32, copy=False)


Batch = dict[str, Tensor]
"""{"features": (batch, F) float32, "labels": (batch,) int64}, the arguments of `MLPForClassification`."""


class FeatureRows(Dataset):
    """N rows of F features with a class each.

    A DataLoader takes one batch with one `index_select`, not one row at a time, when it is given
    `collate_rows`: pass it as Trainer's `data_collator`, with `remove_unused_columns=False`.

    Args:
        features: (N, F), float32.
        labels: (N,), int64.
    """

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features = features
        self.labels = labels

    @property
    def num_features(self) -> int:
        """F."""
        return self.features.shape[1]

    def to(self, device: torch.device) -> "FeatureRows":
        """The same rows on another device."""
        return FeatureRows(self.features.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return {"features": self.features[index], "labels": self.labels[index]}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The rows `indices`, in that order, as one batch; `torch.utils.data` calls it for each batch."""
        rows = torch.as_tensor(indices, dtype=torch.int64, device=self.labels.device)
        return {"features": self.features.index_select(0, rows), "labels": self.labels.index_select(0, rows)}


def collate_rows(rows: Batch | Sequence[Batch]) -> Batch:
    """The `collate_fn` that goes with `FeatureRows`: a batch is passed on as it is.

    Rows from a data set without `__getitems__`, e.g. a `ConcatDataset` of `FeatureRows`, are stacked.
    """
    if isinstance(rows, dict):
        return rows
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@dataclass(frozen=True)
class RawSplit:
    """One split before preprocessing: `labels` (N,) int64, and `read`, which maps row numbers to raw rows."""

    labels: np.ndarray
    read: Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class BenchmarkData:
    """The rows of one benchmark: data sets in memory, whose `to` and `__getitems__` give other devices and batches.

    `eval` is what a run is selected on, the test split as the paper seems to; `eval_split` says in words what it is.
    `label_names` is empty where there are no classes. `processor` is the tokenizer or image processor that a saved
    model needs beside it, if any; `origin` says what was read.
    """

    train: Any
    eval: Any
    eval_split: str
    label_names: tuple[str, ...]
    processor: Any = None
    origin: Origin = field(default_factory=lambda: Origin("rows in memory"))

    def to(self, device: torch.device) -> "BenchmarkData":
        """The same with every row on `device`, so that no batch has to wait for its way there."""
        return replace(self, train=self.train.to(device), eval=self.eval.to(device))


def prepare(
    train: RawSplit,
    evaluated: RawSplit,
    fit: Callable[[Any], Any],
    label_names: Sequence[str],
    options: DataOptions,
    origin: Origin,
    eval_split: str = "test",
) -> BenchmarkData:
    """Choose rows, fit the encoder on the training rows alone, and encode every part with it.

    `fit` maps raw training rows to an encoder, whose `encode` makes raw rows features, (N, F) float32.

    The encoder sees exactly the rows that a run trains on, none beyond `options.max_train_samples`.
    """
    chosen = choose_rows(len(train.labels), len(evaluated.labels), options)
    raw_train, raw_eval = (split.read(rows) for split, rows in zip((train, evaluated), chosen, strict=True))
    encoder = fit(raw_train)

    def rows(split: RawSplit, numbers: np.ndarray, raw: Any) -> FeatureRows:
        labels = split.labels[numbers].astype(np.int64, copy=False)
        return FeatureRows(torch.from_numpy(encoder.encode(raw)), torch.from_numpy(labels))

    train_rows, eval_rows = rows(train, chosen[0], raw_train), rows(evaluated, chosen[1], raw_eval)
    return BenchmarkData(train_rows, eval_rows, eval_split, tuple(label_names), origin=origin)
