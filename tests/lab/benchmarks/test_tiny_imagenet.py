"""Tiny ImageNet's rows, against the image processor that is saved beside a model."""

import datasets
import numpy as np
import pytest
from lgelu_lab.benchmarks.data import DataOptions, ModelOptions
from lgelu_lab.benchmarks.tiny_imagenet import image_processor, load_tiny_imagenet
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
    found = data.test.__getitems__(range(3))["pixel_values"]
    assert found.shape == (3, 3, size, size)
    expected = data.processor([image.convert("RGB") for image in valid["image"]], return_tensors="pt")["pixel_values"]
    # A resized pixel is rounded to a byte there, along rows and then along columns, and not here.
    assert (found - expected).abs().max() <= 1.01 / 255 / 0.224
    assert found.std() > 0.5
    assert data.preprocessing["image_size"] == size


def test_training_rows_are_cropped_from_eight_pixels_more_on_each_side(write_splits):
    data = load_tiny_imagenet(DataOptions(write_splits("tiny_imagenet", {"train": split(4), "valid": split(2)})))
    assert (data.train.augmentation.padding, data.eval.augmentation) == (8, None)
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert data.label_names == ("n1", "n2")
    assert (data.eval_split, data.test_split) == ("valid", "valid")


def test_a_copy_of_all_classes_goes_before_one_of_some(write_splits):
    data_dir = write_splits("tiny_imagenet_40", {"train": split(4), "valid": split(2)})
    assert load_tiny_imagenet(DataOptions(data_dir)).label_names == ("n1", "n2")
    whole = split(4, names=("a", "b", "c"))
    write_splits("tiny_imagenet", {"train": whole, "valid": whole})
    assert load_tiny_imagenet(DataOptions(data_dir)).label_names == ("a", "b", "c")


def test_a_missing_folder_is_named_by_the_whole_copys_name(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*tiny_imagenet, which should hold a copy of zh-plus"):
        load_tiny_imagenet(DataOptions(tmp_path))


def test_images_of_another_size_are_refused(write_splits):
    data_dir = write_splits("tiny_imagenet", {"train": split(2, side=32), "valid": split(2)})
    with pytest.raises(ValueError, match=r"must hold 64x64 RGB or grey images .*, got 32x32"):
        load_tiny_imagenet(DataOptions(data_dir))


def test_the_processor_takes_imagenets_mean_and_deviation():
    processor = image_processor(48)
    pixels = processor(Image.new("RGB", (10, 20), (255, 0, 51)), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 48, 48)
    expected = [(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]
    assert pixels[0].flatten(1).mean(dim=1).tolist() == pytest.approx(expected, abs=1e-5)
