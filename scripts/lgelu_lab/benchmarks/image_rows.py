"""Images held in memory as bytes; a batch is gathered, augmented, normalized and resized at once, on their device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from lgelu_lab.benchmarks.rows import Batch


@dataclass(frozen=True)
class Augmentation:
    """A crop of the image's own size out of the image with `padding` black pixels around it, and a flip.

    The padding is 0 before normalization, as in torchvision's `RandomCrop(padding=...)` on an image. Each of the
    (2·padding + 1)² places and each of the two orientations is equally likely.

    Raises ValueError for a negative padding.
    """

    padding: int

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ValueError(f"padding must be at least 0 pixels, got {self.padding}")

    @property
    def num_outcomes(self) -> int:
        """Ways to augment one image."""
        return 2 * (2 * self.padding + 1) ** 2

    def draw(self, rows: int, seed: int, epoch: int) -> Tensor:
        """(rows,) int64 outcomes in [0, num_outcomes), drawn on the CPU; the same for the same arguments.

        A row's outcome does not depend on how many rows there are.
        """
        state = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(state))
        return torch.randint(self.num_outcomes, (rows,), generator=generator)

    def apply(self, images: Tensor, outcomes: Tensor) -> Tensor:
        """(B, C, H, W) → the same shape and dtype, each image by its own of the (B,) outcomes."""
        batch, channels, height, width = images.shape
        places = 2 * self.padding + 1
        top = outcomes // 2 // places
        left = outcomes // 2 % places
        rows = top[:, None] + torch.arange(height, device=images.device)
        columns = left[:, None] + torch.arange(width, device=images.device)
        columns = torch.where((outcomes % 2 == 1)[:, None], columns.flip(1), columns)
        padded = F.pad(images, (self.padding,) * 4)
        places_of_pixels = (rows[:, :, None] * padded.shape[3] + columns[:, None, :]).view(batch, 1, -1)
        flat = padded.view(batch, channels, -1).gather(2, places_of_pixels.expand(-1, channels, -1))
        return flat.view(images.shape)

    def describe(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"crop_padding": self.padding, "horizontal_flip": True}


class ImageRows(Dataset):
    """N images with a class each.

    Decoded once and kept as bytes, so that no batch waits for its images. Give a DataLoader `collate_rows`, and
    Trainer that as `data_collator` with `remove_unused_columns=False`.

    How a row is augmented depends on (seed, epoch, row number) alone: not on the batch it is in, the process
    that reads it or any generator's state. So a resumed run and a run on several processes see the same images.

    Args:
        images: (N, C, H, W), uint8.
        labels: (N,), int64.
        mean: per channel, in units where pixels go from 0 to 1.
        deviation: likewise.
        image_size: pixels a side of what the model sees; images of another size are resized bilinearly with
            antialiasing, after augmentation.
        augmentation: None for rows that are evaluated on.
        seed: of the augmentation; a run gives its own to `set_epoch`.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: the shapes do not fit, or a deviation is not positive.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: Sequence[float],
        deviation: Sequence[float],
        image_size: int,
        *,
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        if images.dtype != torch.uint8 or labels.dtype != torch.int64:
            raise TypeError(f"images must be uint8 and labels int64, got {images.dtype} and {labels.dtype}")
        if images.ndim != 4 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"images must have shape (N, C, H, W) and labels (N,), got {tuple(images.shape)} and "
                f"{tuple(labels.shape)}"
            )
        if len(mean) != images.shape[1] or len(deviation) != images.shape[1] or min(deviation) <= 0:
            raise ValueError(
                f"mean and deviation must have one number for each of {images.shape[1]} channels, and a deviation "
                f"must be positive, got {list(mean)} and {list(deviation)}"
            )
        self.images, self.labels = images, labels
        self.mean, self.deviation = tuple(mean), tuple(deviation)
        self.image_size = image_size
        self.augmentation = augmentation
        self.seed, self.epoch = seed, 0
        # (x/255 − mean)/deviation as one multiplication and one addition.
        scale = [1 / (255 * value) for value in deviation]
        shift = [-center / value for center, value in zip(mean, deviation, strict=True)]
        self._scale, self._shift = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (scale, shift))
        self._outcomes: Tensor | None = None

    def to(self, device: torch.device) -> "ImageRows":
        """The same rows on another device; batches are made there."""
        moved = ImageRows(
            self.images.to(device), self.labels.to(device), self.mean, self.deviation, self.image_size,
            augmentation=self.augmentation, seed=self.seed,
        )  # fmt: skip
        moved.epoch = self.epoch
        return moved

    def set_epoch(self, epoch: int, seed: int | None = None) -> None:
        """Draw every row's augmentation for this epoch; without `seed` the one before stays."""
        seed = self.seed if seed is None else seed
        if (epoch, seed) != (self.epoch, self.seed):
            self.epoch, self.seed = epoch, seed
            self._outcomes = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The rows `indices`, in that order: {"pixel_values": (B, C, S, S) float32, "labels": (B,) int64}."""
        rows = torch.as_tensor(indices, dtype=torch.int64, device=self.labels.device)
        images = self.images.index_select(0, rows)
        if self.augmentation is not None:
            images = self.augmentation.apply(images, self._drawn().index_select(0, rows))
        return {"pixel_values": self._normalized(images), "labels": self.labels.index_select(0, rows)}

    def _drawn(self) -> Tensor:
        if self._outcomes is None:
            drawn = self.augmentation.draw(len(self), self.seed, self.epoch)
            self._outcomes = drawn.to(self.labels.device)
        return self._outcomes

    def _normalized(self, images: Tensor) -> Tensor:
        """(B, C, H, W) uint8 → (B, C, S, S) float32."""
        # Resizing afterwards is the same as before, since the weights of a resized pixel sum to 1, and cheaper.
        pixels = torch.addcmul(self._shift, images.to(torch.float32), self._scale)
        if pixels.shape[2:] != (self.image_size, self.image_size):
            pixels = F.interpolate(pixels, (self.image_size, self.image_size), mode="bilinear", antialias=True)
        return pixels
