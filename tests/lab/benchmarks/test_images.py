"""Decoding and channel statistics, against the pixels that were encoded and a loop over Python floats."""

import io

import datasets
import numpy as np
import pytest
from lgelu_lab.benchmarks import images
from lgelu_lab.benchmarks.images import class_names, decode_images
from PIL import Image


def encoded(picture, file_format="PNG"):
    stream = io.BytesIO()
    picture.save(stream, file_format, lossless=True)
    return {"bytes": stream.getvalue(), "path": None}


def pixels_of(count, side=6, seed=0):
    return np.random.RandomState(seed).randint(0, 256, (count, side, side, 3)).astype(np.uint8)


def split(pictures):
    return datasets.Dataset.from_dict({"picture": pictures}, features=datasets.Features({"picture": datasets.Image()}))


def decode(rows, numbers, mode="RGB", side=6):
    return decode_images(rows, "picture", np.array(numbers), side, mode, "pets")


@pytest.mark.parametrize("file_format", ["PNG", "WEBP"])
def test_pixels_are_those_that_were_encoded_in_the_order_asked_for(file_format, monkeypatch):
    monkeypatch.setattr(images, "_CHUNK_IMAGES", 2)  # five images are three chunks, the last one short
    pixels = pixels_of(5)
    rows = split([encoded(Image.fromarray(image), file_format) for image in pixels])
    numbers = [3, 0, 4, 1, 3]
    found = decode(rows, numbers)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, pixels[numbers])


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (Image.new("RGB", (6, 7)), r"6x6 RGB or grey images \(PIL mode 'RGB' or 'L'\), got 6x7 of mode 'RGB'"),
        (Image.new("RGBA", (6, 6)), "got 6x6 of mode 'RGBA'"),
    ],
)
def test_other_images_are_refused(picture, message):
    with pytest.raises(ValueError, match=message):
        decode(split([encoded(picture)]), [0])


def test_class_names_need_a_class_label():
    features = datasets.Features({"kind": datasets.ClassLabel(names=["cat", "dog"]), "age": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict({"kind": [0, 1], "age": [3, 4]}, features=features)
    assert class_names(rows, "kind", "pets") == ("cat", "dog")
    with pytest.raises(ValueError, match="column 'age' of pets must be a ClassLabel with names, got Value"):
        class_names(rows, "age", "pets")
