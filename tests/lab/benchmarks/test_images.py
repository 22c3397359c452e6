"""Decoding and channel statistics, against the pixels that were encoded and a loop over Python floats."""

import io

import datasets
import numpy as np
import pytest
import torch
from lgelu_lab.benchmarks import images
from lgelu_lab.benchmarks.images import Augmentation, ImageRows, class_names, decode_images
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
        (Image.new("RGB", (6, 7)), "6x6.*6x7.*'RGB'"),
        (Image.new("RGBA", (6, 6)), "'RGBA'"),
    ],
)
def test_other_images_are_refused(picture, message):
    with pytest.raises(ValueError, match=message):
        decode(split([encoded(picture)]), [0])


def test_class_names_need_a_class_label():
    features = datasets.Features({"kind": datasets.ClassLabel(names=["cat", "dog"]), "age": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict({"kind": [0, 1], "age": [3, 4]}, features=features)
    assert class_names(rows, "kind", "pets") == ("cat", "dog")
    with pytest.raises(ValueError, match=r"'age' of pets.*ClassLabel"):
        class_names(rows, "age", "pets")


MEAN, DEVIATION = (0.5, 0.25, 0.125), (0.25, 0.5, 1.0)


def bytes_of(count, side, seed=0):
    # No black pixel, so that padding can be told from the image.
    return torch.from_numpy(np.random.RandomState(seed).randint(1, 256, (count, 3, side, side)).astype(np.uint8))


def rows(count=6, side=8, image_size=None, **changes):
    return ImageRows(bytes_of(count, side), torch.arange(count), MEAN, DEVIATION, image_size or side, **changes)


def normalized(image):
    """(3, H, W) of integers → (3, H, W) float64, a channel at a time."""
    return np.stack([(image[c] / 255.0 - MEAN[c]) / DEVIATION[c] for c in range(3)])


@pytest.mark.parametrize("image_size", [5, 8, 21])
def test_another_size_is_pillows_bilinear_with_antialiasing(image_size):
    data = rows(count=2, side=12, image_size=image_size)
    found = data.__getitems__([0, 1])["pixel_values"]
    assert found.shape == (2, 3, image_size, image_size)
    for i in range(2):
        image = normalized(data.images[i].numpy().astype(np.float64))
        for c in range(3):
            resized = Image.fromarray(image[c].astype(np.float32)).resize((image_size,) * 2, Image.Resampling.BILINEAR)
            np.testing.assert_allclose(found[i, c], np.asarray(resized), atol=2e-5)


def shifted(image, top, left, flip, padding):
    height, width = image.shape[1:]
    canvas = np.zeros((3, height + 2 * padding, width + 2 * padding), dtype=np.uint8)
    canvas[:, padding : padding + height, padding : padding + width] = image
    crop = canvas[:, top : top + height, left : left + width]
    return crop[:, :, ::-1] if flip else crop


def test_the_outcomes_are_every_crop_in_both_orientations_once():
    augmentation = Augmentation(padding=2)
    image = bytes_of(1, 5)
    assert augmentation.num_outcomes == 50
    found = augmentation.apply(image.expand(50, -1, -1, -1), torch.arange(50))
    assert found.dtype == torch.uint8
    expected = {
        shifted(image[0].numpy(), top, left, flip, 2).tobytes()
        for top in range(5)
        for left in range(5)
        for flip in (False, True)
    }
    assert len(expected) == 50
    assert {picture.numpy().tobytes() for picture in found} == expected


def test_a_rows_augmentation_depends_on_seed_epoch_and_row_alone():
    data = rows(count=40, augmentation=Augmentation(padding=3), seed=5)
    data.set_epoch(2)
    whole = data.__getitems__(range(40))["pixel_values"]
    torch.manual_seed(123)
    again = rows(count=40, augmentation=Augmentation(padding=3))
    again.set_epoch(9, seed=1)
    torch.rand(3)
    again.set_epoch(2, seed=5)
    backwards = torch.cat([again.__getitems__([i])["pixel_values"] for i in reversed(range(40))])
    assert torch.equal(backwards.flip(0), whole)
    assert torch.equal(again.__getitems__([7, 3])["pixel_values"], whole[[7, 3]])
    assert torch.equal(Augmentation(3).draw(3, 5, 2), Augmentation(3).draw(40, 5, 2)[:3])
    for change in ({"epoch": 3}, {"epoch": 2, "seed": 6}):
        again.set_epoch(**change)
        assert not torch.equal(again.__getitems__(range(40))["pixel_values"], whole)


@pytest.mark.gpu
def test_the_accelerator_makes_the_same_batch():
    data = rows(count=40, augmentation=Augmentation(padding=3), image_size=20)
    data.set_epoch(3, seed=4)
    moved = data.to(torch.device("cuda"))
    batch = moved.__getitems__(range(40))
    assert batch["pixel_values"].device.type == batch["labels"].device.type == "cuda"
    torch.testing.assert_close(batch["pixel_values"].cpu(), data.__getitems__(range(40))["pixel_values"])
