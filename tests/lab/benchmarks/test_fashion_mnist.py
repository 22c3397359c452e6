"""Fashion-MNIST's pixels, against a loop over Python floats."""

import math

import datasets
import numpy as np
from lgelu_lab.benchmarks.data import DataOptions
from lgelu_lab.benchmarks.fashion_mnist import load_fashion_mnist
from PIL import Image

NAMES = ["T - shirt / top", "Trouser", "Pullover"]


def pictures(count, seed, shape=(28, 28)):
    return np.random.RandomState(seed).randint(0, 256, (count, *shape)).astype(np.uint8)


def split(pixels, label=None):
    features = datasets.Features({"image": datasets.Image(), "label": label or datasets.ClassLabel(names=NAMES)})
    columns = {"image": [Image.fromarray(image) for image in pixels], "label": [i % 3 for i in range(len(pixels))]}
    return datasets.Dataset.from_dict(columns, features=features)


def loop_statistics(pixels):
    values = [float(value) for value in pixels.ravel()]
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def test_pixels_equal_a_loop(write_splits):
    train, test = pictures(7, seed=0), pictures(4, seed=1) // 2
    data = load_fashion_mnist(DataOptions(write_splits("fashion_mnist", {"train": split(train), "test": split(test)})))
    mean, deviation = loop_statistics(train)
    for rows, pixels in ((data.train, train), (data.eval, test)):
        expected = [[(float(value) - mean) / deviation for value in image.ravel()] for image in pixels]
        assert rows.features.shape == (len(pixels), 784)
        np.testing.assert_allclose(rows.features, expected, rtol=1e-5, atol=1e-6)
        assert rows.labels.tolist() == [i % 3 for i in range(len(pixels))]
    assert (data.label_names, data.train.num_features) == (tuple(NAMES), 784)
    assert data.eval_split == "test"
