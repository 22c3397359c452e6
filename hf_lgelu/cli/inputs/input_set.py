"""Rows that a model takes, and what they are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import AutoImageProcessor

from hf_lgelu.models.example_run import in_dtype

_LOADED_TOGETHER = 64
"""Rows read at a time; how many are computed at a time is another matter."""


class TensorRows(Dataset):
    """N rows of named tensors, such as {"input_ids": (N, T), "attention_mask": (N, T)}.

    `whole` says that no row of where they are from was left out.
    """

    def __init__(self, tensors: dict[str, Tensor], *, whole: bool = False) -> None:
        self.tensors, self.whole = tensors, whole

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.tensors.items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The rows `indices` as one batch, sequences without what is padding behind all of them."""
        batch = {name: tensor[list(indices)] for name, tensor in self.tensors.items()}
        mask = batch.get("attention_mask")
        if mask is None or mask.ndim != 2 or not mask.any():
            return batch
        whole, longest = mask.shape[1], int(mask.any(0).nonzero().max()) + 1
        is_sequence = {name: tensor.ndim > 1 and tensor.shape[1] == whole for name, tensor in batch.items()}
        return {name: tensor[:, :longest] if is_sequence[name] else tensor for name, tensor in batch.items()}


class ProcessedImages(Dataset):
    """Rows {"pixel_values": (C, H, W)}, with "labels" where they are known; decoded when they are asked for.

    Args:
        rows: a `datasets.Dataset`.
        column: of images.
        source: folder or Hub id of the model, whose image processor is taken; of timm's models what config.json's
            `pretrained_cfg` says.
        mode: PIL's name of what a pixel is: "RGB", or "L" for one channel.
        labels: (len(rows),) int64 or None.

    Raises ValueError if there is no image processor.
    """

    def __init__(self, rows: Any, column: str, source: str, *, mode: str = "RGB", labels: Tensor | None = None) -> None:
        try:
            self.processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"images need the model's image processor, and none can be loaded from {source} ({error}). Save it "
                "there (image_processor.save_pretrained), or call hf_lgelu.convert_to_relu with batches of your own"
            ) from error
        self.rows = rows.select_columns(column)
        self.column, self.mode, self.labels = column, mode, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The rows `indices` as one batch."""
        numbers = list(indices)
        found = self.rows[numbers][self.column]
        empty = [number for number, image in zip(numbers, found, strict=True) if image is None]
        if empty:
            raise ValueError(
                f"column {self.column!r} holds no image in row {', '.join(map(str, empty[:8]))} (counted from 0); "
                "leave such rows out"
            )
        images = [image.convert(self.mode) for image in found]
        batch = {"pixel_values": self.processor(images, return_tensors="pt")["pixel_values"]}
        return batch if self.labels is None else {**batch, "labels": self.labels[numbers]}


@dataclass(frozen=True)
class InputSet:
    """Rows that a model takes.

    Args:
        rows: a data set in memory or on disk; `__getitems__` gives a batch, {name of an argument: tensor}, with
            "labels" where they are known.
        description: what they are, in words, such as "rows.csv" or "user/texts, split train".
        source: Hub id of the data set, if it is on the Hub.
        whole: no row was left out.
        dtype: of floating-point inputs, that of the model: not every network casts what it is given.
    """

    rows: Any
    description: str
    source: str | None = None
    whole: bool = False
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, what: str, *, progress: bool, batch_size: int = _LOADED_TOGETHER) -> Iterable[dict[str, Tensor]]:
        """All rows, in order, with a progress bar that says `what` they are for."""
        loader = DataLoader(self.rows, batch_size=batch_size, collate_fn=partial(in_dtype, dtype=self.dtype))
        return tqdm(loader, desc=what, unit="batch", disable=not progress)

    def first(self, count: int) -> dict[str, Tensor]:
        """The first rows as a batch, without labels."""
        batch = self.rows.__getitems__(range(min(count, len(self.rows))))
        return in_dtype({name: tensor for name, tensor in batch.items() if name != "labels"}, self.dtype)


def sample_numbers(available: int, wanted: int | None, seed: int) -> np.ndarray:
    """`wanted` different row numbers below `available`, in the order of a seeded permutation; None takes all.

    The same with every version of numpy, and the first of a larger sample with the same seed.
    """
    numbers = np.random.RandomState(seed).permutation(available)
    return numbers if wanted is None else numbers[:wanted]


def float_rows(values: Any) -> Tensor:
    """(N, F) float32 of what numpy takes. Raises ValueError for another shape, or numbers that are not finite."""
    found = torch.as_tensor(np.asarray(values, dtype=np.float32))
    if found.ndim != 2:
        raise ValueError(f"features must be numbers of shape (rows, features), got shape {tuple(found.shape)}")
    wrong = found.isfinite().logical_not().nonzero()
    if len(wrong):
        features = ", ".join(map(str, wrong[:, 1].unique().tolist()))
        raise ValueError(
            f"features must be finite numbers, and of shape {tuple(found.shape)} {len(wrong)} are none, in feature "
            f"{features} (counted from 0). Leave such rows out, or fill them as where the model was trained"
        )
    return found
