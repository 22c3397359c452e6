"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) with ResNet-18: the paper's ResNet-18/CIFAR-10 and -100."""

from dataclasses import dataclass

from transformers import TimmWrapperForImageClassification

from lgelu_lab.benchmarks.cifar_resnet import SIDE_PIXELS, new_cifar_resnet
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.benchmarks.image_rows import Augmentation
from lgelu_lab.benchmarks.images import ImageSource, prepare_images
from lgelu_lab.benchmarks.locate import load_splits, require_package
from lgelu_lab.benchmarks.options import DataOptions, ModelOptions

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
        ImportError without datasets or pillow; RuntimeError if the Hub cannot be reached.
        """
        options = options or DataOptions()
        columns = ("img", self.label_column)
        found = load_splits(self.folder, self.hub_id, options.data_dir, splits=("train", "test"), columns=columns)
        source = ImageSource(self.folder, found["train"], found["test"], "test", *columns, SIDE_PIXELS)
        return prepare_images(source, options, augmentation=AUGMENTATION)


CIFAR10 = Cifar("uoft-cs/cifar10", "cifar10", "label")
CIFAR100 = Cifar("uoft-cs/cifar100", "cifar100", "fine_label")


def build_resnet18(
    activation: str, data: BenchmarkData, options: ModelOptions | None = None
) -> TimmWrapperForImageClassification:
    """The ResNet-18 of models/cifar_resnet.py for these classes; weights from torch's global generator.

    Raises ImportError without timm.
    """
    require_package("timm")
    return new_cifar_resnet(activation, data.label_names, data.preprocessing["mean"], data.preprocessing["deviation"])
