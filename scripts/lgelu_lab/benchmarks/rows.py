"""Rows held in memory, handed to a DataLoader a batch at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

Batch = dict[str, Tensor]
"""{"features": (batch, F) float32, "labels": (batch,) int64}, the arguments of `MLPForClassification`."""


class TensorRows(Dataset):
    """N rows of F features with a class each.

    A DataLoader takes one batch with one `index_select`, not one row at a time, when it is given
    `collate_rows`: pass it as Trainer's `data_collator`, with `remove_unused_columns=False`.

    Args:
        features: (N, F), float32.
        labels: (N,), int64.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: the shapes are not (N, F) and (N,).
    """

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        if features.dtype != torch.float32 or labels.dtype != torch.int64:
            raise TypeError(f"features must be float32 and labels int64, got {features.dtype} and {labels.dtype}")
        if features.ndim != 2 or labels.shape != features.shape[:1]:
            raise ValueError(
                "features must have shape (N, F) and labels (N,), "
                f"got {tuple(features.shape)} and {tuple(labels.shape)}"
            )
        self.features = features
        self.labels = labels

    @property
    def num_features(self) -> int:
        """F."""
        return self.features.shape[1]

    def to(self, device: torch.device) -> "TensorRows":
        """The same rows on another device."""
        return TensorRows(self.features.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return {"features": self.features[index], "labels": self.labels[index]}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The rows `indices`, in that order, as one batch; `torch.utils.data` calls it for each batch."""
        rows = torch.as_tensor(indices, dtype=torch.int64, device=self.labels.device)
        return {"features": self.features.index_select(0, rows), "labels": self.labels.index_select(0, rows)}


def collate_rows(rows: Batch | Sequence[Batch]) -> Batch:
    """The `collate_fn` that goes with `TensorRows`: a batch is passed on as it is.

    Rows from a data set without `__getitems__`, e.g. a `ConcatDataset` of `TensorRows`, are stacked.

    Raises TypeError for anything else.
    """
    if isinstance(rows, dict):
        return rows
    if not rows or not isinstance(rows[0], dict):
        raise TypeError(
            "collate_rows takes a batch or a list of rows of TensorRows, got "
            f"{rows!r}. Under Trainer, set remove_unused_columns=False"
        )
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
