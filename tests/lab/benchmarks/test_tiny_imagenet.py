"""Tiny ImageNet's rows, against the image processor that is saved beside a model."""

import datasets
import numpy as np
import pytest
from lgelu_lab.benchmarks.data import DataOptions, ModelOptions
from lgelu_lab.benchmarks.tiny_imagenet import load_tiny_imagenet
from PIL import Image


def split(count, seed=0, names=("n1", "n2"), side=64):
    random = np.random.RandomState(seed)
    # Coarse blocks: bytes of noise would be averaged to one grey by any resizing.
    blocks = random.randint(0, 256, (count, side // 8, side // 8, 3)).astype(np.uint8).repeat(8, 1).repeat(8, 2)
    images = [Image.fromarray(image).convert("L" if number == 1 else "RGB") for number, image in enumerate(blocks)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
    return datasets.Dataset.from_dict({"image": images, "label": [i % 2 for i in range(count)]}, features=features)


@pytest.mark.parametrize("image_size", [None, 32, 112])
def test_rows_are_what_the_image_processor_makes_of_the_images(write_splits, image_size):
    valid = split(3, seed=1)
    data_dir = write_splits("tiny_imagenet", {"train": split(4), "valid": valid})
    data = load_tiny_imagenet(DataOptions(data_dir), ModelOptions(image_size=image_size))
    size = image_size or 64
    found = data.eval.__getitems__(range(3))["pixel_values"]
    assert found.shape == (3, 3, size, size)
    expected = data.processor([image.convert("RGB") for image in valid["image"]], return_tensors="pt")["pixel_values"]
    # A resized pixel is rounded to a byte there, along rows and then along columns, and not here.
    assert (found - expected).abs().max() <= 1.01 / 255 / 0.224
    assert found.std() > 0.5
    assert data.train.image_size == size
    assert (data.train.augmentation.padding, data.eval.augmentation) == (8, None)
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert (data.label_names, data.eval_split) == (("n1", "n2"), "valid")
