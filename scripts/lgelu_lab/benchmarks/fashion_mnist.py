"""Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017) as rows of 784 pixels: the paper's MLP/Fashion-MNIST."""

from typing import Any

import numpy as np

from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions, RawSplit, Standardizer, prepare
from lgelu_lab.benchmarks.images import class_names, decode_images, labels_of
from lgelu_lab.benchmarks.mlp import mlp_benchmark
from lgelu_lab.benchmarks.source import load_splits

HUB_ID = "zalando-datasets/fashion_mnist"
FOLDER = "fashion_mnist"
SIDE_PIXELS = 28


def load_fashion_mnist(options: DataOptions | None = None) -> BenchmarkData:
    """60,000 and 10,000 grey images in 10 classes, flattened and standardized by one mean and deviation.

    The statistics are those of all pixels of the training rows, in units of 0 to 255.

    Raises ValueError for missing data, labels that are no ClassLabel, or images that are not 28x28 and
    grey; ImportError without pillow; RuntimeError if the Hub cannot be reached.
    """
    options = options or DataOptions()
    found = load_splits(FOLDER, HUB_ID, options.data_dir, splits=("train", "test"), columns=("image", "label"))
    names = class_names(found.splits["train"], "label", FOLDER)
    return prepare(
        _raw_split(found.splits["train"]),
        _raw_split(found.splits["test"]),
        lambda pixels: Standardizer.fit(pixels, per_column=False),
        names,
        options,
        found.origin,
    )


def _raw_split(rows: Any) -> RawSplit:
    def read(numbers: np.ndarray) -> np.ndarray:
        return decode_images(rows, "image", numbers, SIDE_PIXELS, "L", FOLDER).reshape(len(numbers), -1)

    return RawSplit(labels_of(rows, "label"), read)


FASHION_MNIST = mlp_benchmark("mlp-fmnist", load=load_fashion_mnist, train_batch_size=1024, epochs=50)
