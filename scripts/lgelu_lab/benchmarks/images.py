"""Encoded images of a data set, decoded once, and split into rows that a model trains on."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.benchmarks.image_rows import Augmentation, ImageRows
from lgelu_lab.benchmarks.locate import require_package
from lgelu_lab.benchmarks.options import DataOptions
from lgelu_lab.benchmarks.splits import choose_rows

_CHUNK_IMAGES = 1000
"""Images decoded at a time: their encoded bytes are copied out of Arrow, so a whole split would be there twice."""


@dataclass(frozen=True)
class ImageSource:
    """The training and the test split of an image data set, as `datasets.Dataset`s that are not decoded yet.

    `folder` names the data set in messages, `side_pixels` is the height and width that every image must have.
    """

    folder: str
    train: Any
    test: Any
    test_split: str
    image_column: str
    label_column: str
    side_pixels: int

    def read(self, split: Any, numbers: np.ndarray) -> Tensor:
        """(len(numbers), 3, side, side) uint8 of the rows `numbers` of `split`, in that order."""
        pixels = decode_images(split, self.image_column, numbers, self.side_pixels, "RGB", self.folder)
        return torch.from_numpy(pixels).movedim(3, 1).contiguous()


@dataclass(frozen=True)
class ChannelStatistics:
    """Mean and population standard deviation of each channel, in units where pixels go from 0 to 1."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def fit(cls, images: Tensor) -> "ChannelStatistics":
        """Of all pixels of (N, C, H, W) uint8 images; the deviation of a constant channel is taken as 1."""
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
        return cls(tuple(mean.tolist()), tuple(deviation.tolist()))


def prepare_images(
    source: ImageSource,
    options: DataOptions,
    *,
    augmentation: Augmentation,
    statistics: ChannelStatistics | None = None,
    image_size: int | None = None,
) -> BenchmarkData:
    """Choose rows, decode those alone, and normalize all of them by the statistics of the training rows.

    Args:
        source: where the images are.
        options: which of them are used.
        augmentation: of the training rows; the others are never augmented.
        statistics: what to normalize by; None takes what the training rows have.
        image_size: pixels a side of what the model sees; None keeps the images as they are.
    """
    label_names = class_names(source.train, source.label_column, source.folder)
    train_labels, test_labels = (labels_of(split, source.label_column) for split in (source.train, source.test))
    chosen = choose_rows(train_labels, len(test_labels), options)
    train_images = source.read(source.train, chosen.train)
    statistics = statistics or ChannelStatistics.fit(train_images)
    size = image_size or source.side_pixels

    def rows(images: Tensor, labels: np.ndarray, augmented: Augmentation | None = None) -> ImageRows:
        return ImageRows(
            images, torch.from_numpy(labels), statistics.mean, statistics.deviation, size, augmentation=augmented
        )

    test_rows = eval_rows = rows(source.read(source.test, chosen.test), test_labels[chosen.test])
    eval_split = source.test_split
    if chosen.validation is not None:
        eval_rows = rows(source.read(source.train, chosen.validation), train_labels[chosen.validation])
        eval_split = f"validation ({options.validation_fraction * 100:g} % of train)"
    return BenchmarkData(
        train=rows(train_images, train_labels[chosen.train], augmentation),
        eval=eval_rows,
        test=test_rows,
        eval_split=eval_split,
        test_split=source.test_split,
        label_names=label_names,
        preprocessing={
            "mean": list(statistics.mean),
            "deviation": list(statistics.deviation),
            "image_size": size,
            "augmentation": augmentation.describe(),
        },
    )


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
    datasets = require_package("datasets")
    open_image = require_package("PIL.Image").open
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
