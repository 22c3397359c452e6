"""ResNet-18 for 32x32 images as a timm architecture, for transformers' `TimmWrapperForImageClassification`.

timm's "resnet18" (He et al., 2015, arXiv:1512.03385) halves the image twice before its first block. For CIFAR the
stem is a 3x3 convolution of stride 1 and there is no max-pool: 11,173,962 weights for 10 classes.
17 activation sites: the stem's, and in each of eight blocks one inside and one behind the sum.

The cards of model_cards/ say how a checkpoint with ReLU is read without hf_lgelu.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

ARCHITECTURE = "lgelu_resnet18_cifar"
SIDE_PIXELS = 32

# Where timm looks for what an architecture of this module takes.
default_cfgs = {
    ARCHITECTURE: {
        "num_classes": 10,
        "input_size": (3, SIDE_PIXELS, SIDE_PIXELS),
        "pool_size": (4, 4),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "first_conv": "conv1",
        "classifier": "fc",
    }
}


def lgelu_resnet18_cifar(
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: Any = None,
    cache_dir: Any = None,
    **model_args: Any,
) -> nn.Module:
    """timm's entry point of the architecture; `model_args` are those of timm's ResNet, e.g. act_layer, num_classes.

    Raises ValueError for `pretrained=True`: no weights are published under this name.
    """
    from timm.models import build_model_with_cfg

    if pretrained:
        raise ValueError(f"{ARCHITECTURE} has no published weights; use pretrained=False or load a checkpoint")
    return build_model_with_cfg(
        _resnet18_with_small_stem,
        ARCHITECTURE,
        pretrained,
        pretrained_cfg=pretrained_cfg,
        pretrained_cfg_overlay=pretrained_cfg_overlay,
        cache_dir=cache_dir,
        **model_args,
    )


def register_cifar_resnet() -> None:
    """Make "lgelu_resnet18_cifar" a timm architecture. Idempotent; importing this file calls it. No-op without timm."""
    if importlib.util.find_spec("timm") is None:
        return
    from timm.models import is_model, register_model

    if not is_model(ARCHITECTURE):
        register_model(lgelu_resnet18_cifar)


def new_cifar_resnet(
    activation: str, label_names: Sequence[str], mean: Sequence[float], deviation: Sequence[float]
) -> TimmWrapperForImageClassification:
    """A freshly initialized ResNet-18 for 32x32 images; weights from torch's global generator.

    Args:
        activation: timm's name of it, such as "lambda_gelu", "relu" or "gelu"; every site has one of its own.
        label_names: of the classes.
        mean: per channel, where pixels go from 0 to 1; goes into the config, for pipelines.
        deviation: likewise.
    """
    names = dict(enumerate(label_names))
    config = TimmWrapperConfig(
        architecture=ARCHITECTURE,
        model_args={"act_layer": activation},
        id2label=names,
        label2id={name: index for index, name in names.items()},
        pretrained_cfg={
            "input_size": [3, SIDE_PIXELS, SIDE_PIXELS],
            "mean": list(mean),
            "std": list(deviation),
            "crop_pct": 1.0,
            "interpolation": "bilinear",
        },
    )
    model = TimmWrapperForImageClassification(config)
    # The wrapper draws every convolution from a normal of std 0.02, whatever the architecture did: it is made for
    # checkpoints. He's initialization goes back in; the classifier keeps the wrapper's. timm would also begin with a
    # zero scale at the end of each residual branch (He et al. and torchvision do not): SGD then takes half as many
    # images again, or more, to the same loss (docs/reproduce.md).
    model.timm_model.init_weights(zero_init_last=False)
    return model


def _resnet18_with_small_stem(**model_args: Any) -> nn.Module:
    from timm.models.resnet import BasicBlock, ResNet

    model = ResNet(BasicBlock, (2, 2, 2, 2), zero_init_last=False, **model_args)
    large = model.conv1
    model.conv1 = nn.Conv2d(
        large.in_channels, large.out_channels, 3, padding=1, bias=False,
        device=large.weight.device, dtype=large.weight.dtype,
    )  # fmt: skip
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    for stage in model.feature_info:
        stage["reduction"] = max(1, stage["reduction"] // 4)
    return model


register_cifar_resnet()  # timm builds saved networks of this architecture by its name
