"""ResNet-18 for CIFAR: size, sites, saving and loading, and what timm and transformers make of it."""

import pytest
import torch
from lgelu_lab.benchmarks.cifar_resnet import new_cifar_resnet, register_cifar_resnet
from torch import nn

from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.networks.sites import lambda_gelu_modules
from hf_lgelu.registry import register_activation

register_activation()
register_cifar_resnet()

NAMES = [f"class {i}" for i in range(10)]
MEAN, DEVIATION = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
BLOCKS = [f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)]
SITES = ["act1"] + [f"{block}.{site}" for block in BLOCKS for site in ("act1", "act2")]


def build(activation="lambda_gelu", seed=0):
    torch.manual_seed(seed)
    return new_cifar_resnet(activation, NAMES, MEAN, DEVIATION)


def trained(model):
    """As after training: no scale is 0 and no hardness is that of its neighbours."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bn" in name:
                parameter.normal_(mean=0.5, std=0.1)
        for index, (_, module) in enumerate(lambda_gelu_modules(model)):
            module.raw_hardness.fill_(0.01 * index)
        model.train()(images(8, seed=2))
    return model.eval()


def images(count=2, seed=0):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, inputs):
    return model.eval()(inputs).logits


def test_it_has_the_papers_size_and_17_hardnesses():
    counts = {name: parameter.numel() for name, parameter in build().named_parameters()}
    hardness = [count for name, count in counts.items() if name.endswith("raw_hardness")]
    assert hardness == [1] * 17
    assert sum(counts.values()) - 17 == 11_173_962


def test_every_site_has_its_own_hardness_and_runs_once_in_order_behind_the_sum_too():
    model = trained(build())
    ran, inputs, outputs = [], {}, {}

    def keep(name):
        def hook(module, args, output):
            inputs[name], outputs[name] = args[0].clone(), output.clone()  # the sum is made in place
            if isinstance(module, LambdaGELU):
                ran.append(name)

        return hook

    for name, module in model.timm_model.named_modules():
        module.register_forward_hook(keep(name))
    logits(model, images())
    assert ran == SITES
    assert len({id(module.raw_hardness) for _, module in lambda_gelu_modules(model)}) == 17
    for block in BLOCKS:
        shortcut = outputs.get(f"{block}.downsample", inputs[block])
        assert torch.equal(inputs[f"{block}.act2"], outputs[f"{block}.bn2"] + shortcut)
    # No halving before the second stage.
    assert [outputs[f"layer{stage}"].shape[-1] for stage in range(1, 5)] == [32, 16, 8, 4]
    assert outputs["act1"].shape == (2, 64, 32, 32)


def test_weights_start_as_he_et_al_say():
    """transformers' wrapper would draw every convolution from a normal of std 0.02; timm would set scales to 0."""
    model = build("relu").timm_model
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] ** 2
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05), name
        elif isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all(), name
            assert not module.bias.any(), name
    assert 0.015 < model.fc.weight.std().item() < 0.03
    assert not model.fc.bias.any()
