"""The lines of Python with which a model card says how to load its model."""

from lgelu_lab.benchmarks.cifar_resnet import ARCHITECTURE

_MLP = """\
import torch
from safetensors.torch import load_file

weights = load_file("model.safetensors")
modules = []
for name in [*(f"layers.{{i}}.linear" for i in range({layers})), "classifier"]:
    linear = torch.nn.Linear(*weights[f"{{name}}.weight"].T.shape)
    linear.load_state_dict({{part: weights[f"{{name}}.{{part}}"] for part in ("weight", "bias")}})
    modules += [linear, torch.nn.{activation}()]
model = torch.nn.Sequential(*modules[:-1]).eval()"""

_CIFAR_RESNET = """\
import timm
import torch
from safetensors.torch import load_file

model = timm.create_model("resnet18", num_classes={classes}{act_layer})
model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
model.maxpool = torch.nn.Identity()
weights = load_file("model.safetensors")
model.load_state_dict({{name.removeprefix("timm_model."): tensor for name, tensor in weights.items()}})
model.eval()"""

_TRANSFORMERS = """\
from transformers import {model_class}

model = {model_class}.from_pretrained("{where}")"""

_CARRIED = """\
from transformers import AutoModel

model = AutoModel.from_pretrained("{where}", trust_remote_code=True)  # runs mlp.py: read it first"""

_HF_LGELU = """\
import hf_lgelu
from {package} import {model_class}

model = hf_lgelu.from_pretrained({model_class}, "{where}")"""

_MLP_CLASS = "MLPForClassification"


def with_hf_lgelu(model_class: str, where: str) -> str:
    """How a checkpoint is loaded where this package is installed; `where` is a folder or Hub id."""
    package = "hf_lgelu" if model_class == _MLP_CLASS else "transformers"
    return _HF_LGELU.format(package=package, model_class=model_class, where=where)


def without_hf_lgelu(
    model_class: str, where: str, *, activation: str, architecture: str | None, layers: int | None, classes: int | None
) -> str:
    """How a ReLU or GELU checkpoint is loaded where this package is not installed.

    Args:
        model_class: class of the model, e.g. "GPT2LMHeadModel".
        where: folder or Hub id.
        activation: "relu" or "gelu".
        architecture: timm's name of it for a model in transformers' wrapper.
        layers: hidden layers, for the MLP.
        classes: for the ResNet of 32x32 images.
    """
    if model_class == _MLP_CLASS:
        return _MLP.format(layers=layers, activation={"relu": "ReLU", "gelu": "GELU"}[activation])
    if architecture == ARCHITECTURE:
        act_layer = "" if activation == "relu" else f', act_layer="{activation}"'
        return _CIFAR_RESNET.format(classes=classes, act_layer=act_layer)
    return _TRANSFORMERS.format(model_class=model_class, where=where)


def with_carried_code(where: str) -> str:
    """How an MLP with its own source (`attach_model_code`) is loaded; `where` is a folder or Hub id."""
    return _CARRIED.format(where=where)
