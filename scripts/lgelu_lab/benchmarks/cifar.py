"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) with ResNet-18: the paper's ResNet-18/CIFAR-10 and -100."""

from dataclasses import dataclass

from transformers import TimmWrapperForImageClassification

from hf_lgelu.environment import require
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.cifar_resnet import SIDE_PIXELS, new_cifar_resnet
from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions, ModelOptions
from lgelu_lab.benchmarks.images import Augmentation, image_benchmark, prepare_images
from lgelu_lab.benchmarks.source import load_splits

AUGMENTATION = Augmentation(padding=4)


@dataclass(frozen=True)
class Cifar:
    """One of the two data sets: 50,000 and 10,000 RGB images of 32x32 pixels."""

    hub_id: str
    folder: str
    label_column: str

    def load(self, options: DataOptions | None = None, model_options: ModelOptions | None = None) -> BenchmarkData:
        """Normalized by each channel's mean and deviation in the training rows, which are cropped and flipped.

        Raises ValueError for missing data, labels that are no ClassLabel, or images that are not 32x32;
        ImportError without pillow; RuntimeError if the Hub cannot be reached.
        """
        options = options or DataOptions()
        columns = ("img", self.label_column)
        found = load_splits(self.folder, self.hub_id, options.data_dir, splits=("train", "test"), columns=columns)
        return prepare_images(
            found, self.folder, options, test_split="test", columns=columns, side_pixels=SIDE_PIXELS,
            augmentation=AUGMENTATION,
        )  # fmt: skip


CIFAR10 = Cifar("uoft-cs/cifar10", "cifar10", "label")
CIFAR100 = Cifar("uoft-cs/cifar100", "cifar100", "fine_label")


def build_resnet18(
    activation: str, data: BenchmarkData, options: ModelOptions | None = None
) -> TimmWrapperForImageClassification:
    """The ResNet-18 of cifar_resnet.py for these classes; weights from torch's global generator.

    Raises ImportError without timm.
    """
    require("timm", "timm")
    return new_cifar_resnet(activation, data.label_names, data.train.mean, data.train.deviation)


# Ours, for all 50,000 images in about two and a half hours of one core. docs/reproduce.md compares Muon with SGD.
_CPU_RECIPE = {
    "timm_optimizer": "nmuon",  # Nesterov's momentum of 0.95; AdamW for biases, norms and the raw hardness
    "learning_rate": 0.02,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.2,  # of all steps
    "per_device_train_batch_size": 128,  # more of them at once do not fit a processor's cache
    "gradient_accumulation_steps": 4,
    "label_smoothing_factor": 0.1,
    "num_train_epochs": 8,
    "bf16": True,
    "channels_last": True,
}


# With 0.05 ReLU from the start and swapped early stay below 0.92 on CIFAR-10.
_CPU_WEIGHT_DECAY = {10: 0.12, 100: 0.05}


def _benchmark(cifar: Cifar, classes: int) -> Benchmark:
    return image_benchmark(
        name=f"resnet18-cifar{classes}",
        load=cifar.load,
        build_model=build_resnet18,
        weight_decay=1e-4,
        epochs=75,
        cpu_defaults=_CPU_RECIPE | {"weight_decay": _CPU_WEIGHT_DECAY[classes]},
    )


RESNET18_CIFAR10, RESNET18_CIFAR100 = _benchmark(CIFAR10, 10), _benchmark(CIFAR100, 100)
"""Rows of BENCHMARKS."""
