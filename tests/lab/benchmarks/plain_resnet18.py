"""The lines of models/cifar_resnet.py's docstring, run by test_cifar_resnet.py without hf_lgelu: argv is
folder, images, logits to write."""

import sys

import safetensors.torch
import timm
import torch

folder, images, logits = sys.argv[1:]
model = timm.create_model("resnet18", num_classes=10)
model.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
model.maxpool = torch.nn.Identity()
weights = safetensors.torch.load_file(f"{folder}/model.safetensors")
model.load_state_dict({name.removeprefix("timm_model."): tensor for name, tensor in weights.items()})
with torch.no_grad():
    torch.save(model.eval()(torch.load(images)), logits)
assert not any(name.startswith("hf_lgelu") for name in sys.modules)
