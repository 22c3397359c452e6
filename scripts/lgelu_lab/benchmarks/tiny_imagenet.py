"""Tiny ImageNet (Le and Yang, 2015), the data of the paper's DeiT-Tiny/Tiny ImageNet."""

from dataclasses import replace

from transformers import BaseImageProcessor
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from transformers.utils import is_torchvision_available

from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.benchmarks.image_rows import Augmentation
from lgelu_lab.benchmarks.images import ChannelStatistics, ImageSource, prepare_images
from lgelu_lab.benchmarks.locate import load_splits
from lgelu_lab.benchmarks.options import DataOptions, ModelOptions

HUB_ID = "zh-plus/tiny-imagenet"
FOLDERS = ("tiny_imagenet", "tiny_imagenet_40")
"""A copy of all 200 classes, or of every fifth."""
SIDE_PIXELS = 64
AUGMENTATION = Augmentation(padding=SIDE_PIXELS // 8)
"""The share of the image's side that CIFAR's 4 pixels are."""


def load_tiny_imagenet(options: DataOptions | None = None, model_options: ModelOptions | None = None) -> BenchmarkData:
    """100,000 and 10,000 RGB images of 64x64 pixels in 200 classes; a copy with fewer classes has fewer rows.

    Normalized by ImageNet's mean and deviation, as the checkpoints that may be fine-tuned expect. Training
    rows are cropped and flipped at 64x64; then all are resized to `model_options.image_size`.

    Raises ValueError for missing data, labels that are no ClassLabel, or images that are not 64x64;
    ImportError without datasets or pillow; RuntimeError if the Hub cannot be reached.
    """
    options, model_options = options or DataOptions(), model_options or ModelOptions()
    columns = ("image", "label")
    found = load_splits(FOLDERS, HUB_ID, options.data_dir, splits=("train", "valid"), columns=columns)
    data = prepare_images(
        ImageSource(FOLDERS[0], found["train"], found["valid"], "valid", *columns, SIDE_PIXELS),
        options,
        augmentation=AUGMENTATION,
        statistics=ChannelStatistics(tuple(IMAGENET_DEFAULT_MEAN), tuple(IMAGENET_DEFAULT_STD)),
        image_size=model_options.image_size,
    )
    return replace(data, processor=image_processor(data.preprocessing["image_size"]))


def image_processor(image_size: int) -> BaseImageProcessor:
    """What prepares an image of any size for a model that was trained on these rows."""
    if is_torchvision_available():
        from transformers import ViTImageProcessor as Processor
    else:
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil as Processor

    # A ViTImageProcessor resizes bilinearly unless told otherwise.
    return Processor(
        size={"height": image_size, "width": image_size},
        image_mean=list(IMAGENET_DEFAULT_MEAN),
        image_std=list(IMAGENET_DEFAULT_STD),
    )
