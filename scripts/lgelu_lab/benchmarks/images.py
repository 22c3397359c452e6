"""Images: decoded once, kept as bytes, and gathered, augmented, normalized and resized a batch at a time."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_lgelu.environment import require
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import Batch, BenchmarkData, DataOptions, choose_rows, collate_rows
from lgelu_lab.benchmarks.metrics import classification_scores
from lgelu_lab.benchmarks.source import Found


@dataclass(frozen=True)
class Augmentation:
    """A crop of the image's own size out of the image with `padding` black pixels around it, and a flip.

    The padding is 0 before normalization, as in torchvision's `RandomCrop(padding=...)` on an image. Each of the
    (2·padding + 1)² places and each of the two orientations is equally likely.
    """

    padding: int

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


_CHUNK_IMAGES = 1000
"""Images decoded at a time: their encoded bytes are copied out of Arrow, so a whole split would be there twice."""


class AugmentationCallback(TrainerCallback):
    """Tells rows that augment which epoch it is; the draws of an epoch are then the same after a resume."""

    def __init__(self, rows: ImageRows) -> None:
        self.rows = rows

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.rows.set_epoch(int(state.epoch or 0), args.seed)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, population standard deviation) of each channel of (N, C, H, W) uint8 images, pixels from 0 to 1.

    The deviation of a constant channel is taken as 1.
    """
    channels = images.shape[1]
    counts = np.zeros((channels, 256), dtype=np.int64)
    for chunk in images.split(_CHUNK_IMAGES):
        for channel in range(channels):
            counts[channel] += np.bincount(chunk[:, channel].flatten().numpy(), minlength=256)
    values = np.arange(256) / 255
    shares = counts / counts.sum(axis=1, keepdims=True)
    mean = shares @ values
    deviation = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(axis=1))
    deviation[(counts > 0).sum(axis=1) == 1] = 1.0
    return tuple(mean.tolist()), tuple(deviation.tolist())


def prepare_images(
    found: Found,
    folder: str,
    options: DataOptions,
    *,
    test_split: str,
    columns: tuple[str, str],
    side_pixels: int,
    augmentation: Augmentation,
    statistics: tuple[Sequence[float], Sequence[float]] | None = None,
    image_size: int | None = None,
) -> BenchmarkData:
    """Choose rows, decode those alone, and normalize all of them by the statistics of the training rows.

    Args:
        found: the splits "train" and `test_split`.
        folder: the data set's name in messages.
        options: which rows are used.
        test_split: the split that is evaluated on.
        columns: of the images and of their classes.
        side_pixels: height and width that every image must have.
        augmentation: of the training rows; the others are never augmented.
        statistics: mean and deviation to normalize by; None takes what the training rows have.
        image_size: pixels a side of what the model sees; None keeps the images as they are.
    """
    image_column, label_column = columns
    splits = [found.splits[name] for name in ("train", test_split)]
    labels = [labels_of(split, label_column) for split in splits]
    chosen = choose_rows(len(labels[0]), len(labels[1]), options)
    images = []
    for split, numbers in zip(splits, chosen, strict=True):
        pixels = decode_images(split, image_column, numbers, side_pixels, "RGB", folder)
        images.append(torch.from_numpy(pixels).movedim(3, 1).contiguous())
    statistics = statistics or channel_statistics(images[0])
    train, evaluated = (
        ImageRows(pixels, torch.from_numpy(of[numbers]), *statistics, image_size or side_pixels, augmentation=augmented)
        for pixels, of, numbers, augmented in zip(images, labels, chosen, (augmentation, None), strict=True)
    )
    names = class_names(splits[0], label_column, folder)
    return BenchmarkData(train, evaluated, test_split, names, origin=found.origin)


def class_names(split: Any, column: str, folder: str) -> tuple[str, ...]:
    """The names of a ClassLabel column. Raises ValueError for a column that is none."""
    names = getattr(split.features[column], "names", None)
    if not names:
        raise ValueError(f"column {column!r} of {folder} must be a ClassLabel with names, got {split.features[column]}")
    return tuple(names)


def labels_of(split: Any, column: str) -> np.ndarray:
    """(N,) int64."""
    return split.with_format("numpy")[column][:].astype(np.int64)


def decode_images(split: Any, column: str, numbers: np.ndarray, side_pixels: int, mode: str, folder: str) -> np.ndarray:
    """Decode rows `numbers` of an image column, in that order.

    Args:
        split: a `datasets.Dataset`.
        column: of images, encoded or named by path.
        numbers: row numbers.
        side_pixels: height and width that each image must have.
        mode: PIL's name of what a pixel is: "L" for (N, side, side), grey images alone; "RGB" for
            (N, side, side, 3), grey ones converted.
        folder: the data set's name in messages.

    Returns uint8. Raises ValueError for an image of another size or mode.
    """
    import datasets  # takes a second, and many who import this file read no data

    open_image = require("PIL.Image", "benchmarks").open
    encoded = split.cast_column(column, datasets.Image(decode=False)).with_format("arrow")
    channels = (3,) if mode == "RGB" else ()
    pixels = np.empty((len(numbers), side_pixels, side_pixels, *channels), dtype=np.uint8)
    for start in range(0, len(numbers), _CHUNK_IMAGES):
        chunk = encoded[numbers[start : start + _CHUNK_IMAGES]][column].to_pylist()
        for row, image in enumerate(chunk, start):
            with open_image(image["path"] if image["bytes"] is None else io.BytesIO(image["bytes"])) as opened:
                _check_image(opened, side_pixels, ("RGB", "L") if mode == "RGB" else (mode,), folder)
                pixels[row] = np.asarray(opened if opened.mode == mode else opened.convert(mode))
    return pixels


def _check_image(opened: Any, side_pixels: int, modes: Sequence[str], folder: str) -> None:
    if opened.mode not in modes or opened.size != (side_pixels, side_pixels):
        kinds = {"L": "grey", "RGB": "RGB"}
        width, height = opened.size
        raise ValueError(
            f"{folder} must hold {side_pixels}x{side_pixels} {' or '.join(kinds[mode] for mode in modes)} images "
            f"(PIL mode {' or '.join(map(repr, modes))}), got {width}x{height} of mode {opened.mode!r}"
        )


_RECIPE = {
    "optim": "adamw_torch",
    "learning_rate": 5e-4,
    # As for the MLPs. It was not compared with cosine, nor was a warmup for DeiT: what was measured is that
    # ResNet-18 learns so (GELU, 5 epochs of 4,096 images of CIFAR-10: 0.21, 0.29, 0.35, 0.42, 0.43 of 1,000).
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 128,
    "per_device_eval_batch_size": 256,
    "remove_unused_columns": False,
}


def image_benchmark(*, weight_decay: float, epochs: int, **fields: Any) -> Benchmark:
    """A row of BENCHMARKS of images; `fields` are those of `Benchmark` that are its own."""
    return Benchmark(
        collate=collate_rows,
        compute_metrics=classification_scores,
        metric="accuracy",
        greater_is_better=True,
        defaults={**_RECIPE, "weight_decay": weight_decay, "num_train_epochs": epochs},
        **fields,
    )
