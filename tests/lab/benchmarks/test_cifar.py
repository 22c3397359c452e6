"""CIFAR's rows, against the pixels that were written, and the network that is built for them."""

import datasets
import numpy as np
import pytest
from lgelu_lab.benchmarks.cifar import CIFAR10, CIFAR100
from lgelu_lab.benchmarks.data import DataOptions
from PIL import Image

from hf_lgelu.registry import register_activation

register_activation()
NAMES = ["cat", "dog", "frog"]


def pictures(count, seed, side=32):
    return np.random.RandomState(seed).randint(0, 256, (count, side, side, 3)).astype(np.uint8)


def split(pixels, **changes):
    label = datasets.ClassLabel(names=NAMES)
    columns = {"img": datasets.Image(), "label": label, "fine_label": label, "coarse_label": datasets.Value("int64")}
    labels = [i % 3 for i in range(len(pixels))]
    values = {
        "img": [Image.fromarray(image) for image in pixels],
        "label": labels,
        "fine_label": labels[::-1],
        "coarse_label": [0] * len(pixels),
    }
    features = datasets.Features(columns | changes)
    return datasets.Dataset.from_dict(values, features=features)


def standardized(images, statistics_of):
    """(N, 32, 32, 3) integers → (N, 3, 32, 32) float64, a channel at a time."""
    channels = []
    for channel in range(3):
        values = statistics_of[..., channel].astype(np.float64) / 255
        channels.append((images[..., channel] / 255 - values.mean()) / values.std())
    return np.stack(channels, axis=1)


@pytest.mark.parametrize(("cifar", "reverse"), [(CIFAR10, 1), (CIFAR100, -1)])
def test_pixels_are_standardized_by_the_training_rows(write_splits, cifar, reverse):
    train, test = pictures(7, seed=0), pictures(4, seed=1) // 2
    data = cifar.load(DataOptions(write_splits(cifar.folder, {"train": split(train), "test": split(test)})))
    batch = data.eval.__getitems__(range(4))
    np.testing.assert_allclose(batch["pixel_values"], standardized(test, train), rtol=1e-5, atol=1e-5)
    assert batch["labels"].tolist() == [0, 1, 2, 0][::reverse]
    assert (data.label_names, data.eval_split, data.train.image_size) == (tuple(NAMES), "test", 32)
    assert (data.train.augmentation.padding, data.eval.augmentation) == (4, None)
