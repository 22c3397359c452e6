"""Images of a data set as a model's own image processor prepares them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoImageProcessor, BaseImageProcessor


class ProcessedImages(Dataset):
    """Rows {"pixel_values": (C, H, W)}, with "labels" where they are known; decoded when they are asked for.

    Args:
        rows: a `datasets.Dataset`.
        column: of images.
        processor: the model's.
        mode: PIL's name of what a pixel is: "RGB", or "L" for one channel.
        labels: (len(rows),) int64 or None.
    """

    def __init__(
        self, rows: Any, column: str, processor: BaseImageProcessor, *, mode: str = "RGB", labels: Tensor | None = None
    ) -> None:
        self.rows = rows.select_columns(column)
        self.column, self.processor, self.mode, self.labels = column, processor, mode, labels

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


def image_processor_of(model: str) -> BaseImageProcessor:
    """The image processor beside a checkpoint; of timm's models what config.json's `pretrained_cfg` says.

    Raises ValueError if there is none.
    """
    try:
        return AutoImageProcessor.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"images need the model's image processor, and none can be loaded from {model} ({error}). Save it there "
            "(image_processor.save_pretrained; of a timm model config.json's pretrained_cfg is read), or call "
            "hf_lgelu.convert_to_relu with batches of your own"
        ) from error
