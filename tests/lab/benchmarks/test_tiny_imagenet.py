"""Tiny ImageNet's rows against the saved image processor, and DeiT-Tiny: its sizes, and a saved one in a pipeline."""

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from lgelu_lab.benchmarks.data import DataOptions, ModelOptions
from lgelu_lab.benchmarks.tiny_imagenet import build_deit, load_tiny_imagenet
from PIL import Image

from hf_lgelu.networks.sites import lambda_gelu_modules
from hf_lgelu.registry import register_activation


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


register_activation()
DATA = SimpleNamespace(label_names=("cat", "dog", "frog"))


def test_it_is_the_papers_model():
    model = build_deit("lambda_gelu", SimpleNamespace(label_names=[str(i) for i in range(1000)]))
    assert model.num_parameters() == 5_717_416 + 12
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (12, 192, 3)
    assert (config.intermediate_size, config.image_size, config.patch_size, config.model_type) == (768, 224, 16, "vit")
    assert len(lambda_gelu_modules(model)) == 12


def test_an_image_that_patches_do_not_fill_is_refused():
    with pytest.raises(ValueError, match="16, got 40"):
        build_deit("gelu", DATA, ModelOptions(image_size=40, patch_size=16))
