"""DeiT-Tiny (Touvron et al., arXiv:2012.12877) on Tiny ImageNet (Le and Yang, 2015), from scratch.

It is transformers' ViT, not its DeiT: facebook/deit-tiny-patch16-224 is saved as one, and the DeiT class adds a
distillation token that only a teacher gives something to do.
"""

from dataclasses import replace

from transformers import BaseImageProcessor, PreTrainedModel, ViTConfig, ViTForImageClassification
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions, ModelOptions
from lgelu_lab.benchmarks.images import Augmentation, image_benchmark, prepare_images
from lgelu_lab.benchmarks.source import load_splits

HUB_ID = "zh-plus/tiny-imagenet"
FOLDERS = ("tiny_imagenet", "tiny_imagenet_40")
"""A copy of all 200 classes, or of every fifth."""
SIDE_PIXELS = 64
AUGMENTATION = Augmentation(padding=SIDE_PIXELS // 8)
"""The share of the image's side that CIFAR's 4 pixels are."""
DEFAULT_IMAGE_SIZE = 224
DEFAULT_PATCH_SIZE = 16


def load_tiny_imagenet(options: DataOptions | None = None, model_options: ModelOptions | None = None) -> BenchmarkData:
    """100,000 and 10,000 RGB images of 64x64 pixels in 200 classes; a copy with fewer classes has fewer rows.

    Normalized by ImageNet's mean and deviation. Training
    rows are cropped and flipped at 64x64; then all are resized to `model_options.image_size`.

    Raises ValueError for missing data, labels that are no ClassLabel, or images that are not 64x64;
    ImportError without pillow; RuntimeError if the Hub cannot be reached.
    """
    options, model_options = options or DataOptions(), model_options or ModelOptions()
    columns = ("image", "label")
    found = load_splits(FOLDERS, HUB_ID, options.data_dir, splits=("train", "valid"), columns=columns)
    data = prepare_images(
        found, FOLDERS[0], options, test_split="valid", columns=columns, side_pixels=SIDE_PIXELS,
        augmentation=AUGMENTATION, statistics=(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
        image_size=model_options.image_size,
    )  # fmt: skip
    return replace(data, processor=image_processor(data.train.image_size))


def image_processor(image_size: int) -> BaseImageProcessor:
    """What prepares an image of any size for a model that was trained on these rows."""
    from transformers import ViTImageProcessor  # loads torchvision

    # A ViTImageProcessor resizes bilinearly unless told otherwise.
    return ViTImageProcessor(
        size={"height": image_size, "width": image_size},
        image_mean=list(IMAGENET_DEFAULT_MEAN),
        image_std=list(IMAGENET_DEFAULT_STD),
    )


def build_deit(activation: str, data: BenchmarkData, options: ModelOptions | None = None) -> PreTrainedModel:
    """12 layers of width 192 with 3 heads; 5,717,416 weights for 1,000 classes at 224 pixels.

    Weights come from torch's global generator. Raises ValueError for an image that patches do not fill.
    """
    options = options or ModelOptions()
    image_size = options.image_size or DEFAULT_IMAGE_SIZE
    names = dict(enumerate(data.label_names))
    labels = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    patch_size = options.patch_size or DEFAULT_PATCH_SIZE
    if image_size % patch_size:
        raise ValueError(f"image_size must be divisible by the patch size, {patch_size}, got {image_size}")
    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        hidden_act=activation,
        image_size=image_size,
        patch_size=patch_size,
        **labels,
    )
    return ViTForImageClassification(config)


DEIT_TINY_IMAGENET = image_benchmark(
    name="deit-tiny-imagenet",
    load=load_tiny_imagenet,
    build_model=build_deit,
    weight_decay=7e-2,
    epochs=90,
    model_defaults={"image_size": DEFAULT_IMAGE_SIZE, "patch_size": DEFAULT_PATCH_SIZE},
)
