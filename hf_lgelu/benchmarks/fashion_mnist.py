"""Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017) as rows of 784 pixels: the paper's MLP/Fashion-MNIST."""

import io
from typing import Any

import numpy as np

from hf_lgelu.benchmarks.data import BenchmarkData, RawSplit, prepare
from hf_lgelu.benchmarks.locate import load_splits, require_package
from hf_lgelu.benchmarks.options import DataOptions
from hf_lgelu.benchmarks.standardize import Standardizer

HUB_ID = "zalando-datasets/fashion_mnist"
FOLDER = "fashion_mnist"
SIDE_PIXELS = 28


def load_fashion_mnist(options: DataOptions | None = None) -> BenchmarkData:
    """60,000 and 10,000 grey images in 10 classes, flattened and standardized by one mean and deviation.

    The statistics are those of all pixels of the training rows, in units of 0 to 255.

    Raises ValueError for missing data, labels that are no ClassLabel, or images that are not 28x28 and
    grey; ImportError without datasets or pillow; RuntimeError if the Hub cannot be reached.
    """
    options = options or DataOptions()
    found = load_splits(FOLDER, HUB_ID, options.data_dir, splits=("train", "test"), columns=("image", "label"))
    names = getattr(found["train"].features["label"], "names", None)
    if not names:
        raise ValueError(
            f"column 'label' of {FOLDER} must be a ClassLabel with names, got {found['train'].features['label']}"
        )
    return prepare(
        _raw_split(found["train"]),
        _raw_split(found["test"]),
        lambda pixels: Standardizer.fit(pixels, per_column=False),
        names,
        options,
    )


def _raw_split(rows: Any) -> RawSplit:
    datasets = require_package("datasets")
    encoded = rows.cast_column("image", datasets.Image(decode=False)).with_format("arrow")
    labels = rows.with_format("numpy")["label"][:]
    return RawSplit(labels, lambda numbers: _decode(encoded[numbers]["image"]))


def _decode(images: Any) -> np.ndarray:
    """(N, 784) uint8 of an Arrow column of encoded images."""
    image_module = require_package("PIL.Image")
    pixels = np.empty((len(images), SIDE_PIXELS * SIDE_PIXELS), dtype=np.uint8)
    for row, image in enumerate(images.to_pylist()):
        source = image["path"] if image["bytes"] is None else io.BytesIO(image["bytes"])
        with image_module.open(source) as opened:
            if opened.mode != "L" or opened.size != (SIDE_PIXELS, SIDE_PIXELS):
                width, height = opened.size
                raise ValueError(
                    f"{FOLDER} must hold {SIDE_PIXELS}x{SIDE_PIXELS} grey images (PIL mode 'L'), "
                    f"got {width}x{height} of mode {opened.mode!r}"
                )
            pixels[row] = np.frombuffer(opened.tobytes(), dtype=np.uint8)
    return pixels
