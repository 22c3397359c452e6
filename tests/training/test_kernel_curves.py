"""32 training steps with each kernel follow the loss curve of a composed x·Φ(λx) in float64."""

import pytest
import torch
from tiny_training import lambda_gelus
from torch import nn
from torch.nn import functional as F

from hf_lgelu.activation.kernels import KERNELS, use_kernel
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.models.sites import find_sites

STEPS = 32


class Composed(nn.Module):
    """x·Φ((1 + softplus(s/t))·x), differentiated by autograd."""

    def __init__(self, raw_hardness, temperature):
        super().__init__()
        self.raw_hardness, self.temperature = nn.Parameter(raw_hardness), temperature

    def forward(self, x):
        return x * torch.special.ndtr((1 + F.softplus(self.raw_hardness / self.temperature)) * x)


def mlp():
    """Network and its batches: ten classes that a linear map, squared, decides."""
    torch.manual_seed(0)
    model = MLPForClassification(MLPConfig(num_features=32, num_labels=10, hidden_size=64, num_hidden_layers=2))
    generator = torch.Generator().manual_seed(100)
    features = torch.randn(STEPS, 64, 32, generator=generator)
    labels = (features @ torch.randn(32, 10, generator=generator)).square().argmax(-1)
    return model, [{"features": x, "labels": y} for x, y in zip(features, labels, strict=True)]


def in_double(model):
    """The same network with every λ-GELU composed, in float64 throughout."""
    for site in find_sites(model, ("lambda_gelu",)):
        module = site.module
        site.put(Composed(module.raw_hardness.detach().double(), module.temperature.double()))
    return model.double()


def curve(model, batches, forward=None):
    """The loss of each step; SGD, and s learns nine times as fast."""
    hardness = [parameter for name, parameter in model.named_parameters() if name.endswith("raw_hardness")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("raw_hardness")]
    groups = [{"params": others}] + ([{"params": hardness, "lr": 0.45}] if hardness else [])
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    width, losses = next(model.parameters()).dtype, []
    forward = model if forward is None else forward
    for batch in batches:
        batch = {name: x.to(width) if x.is_floating_point() else x for name, x in batch.items()}
        loss = forward(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


@pytest.fixture(scope="module")
def in_float64():
    """The network's curve in float64, and where that moved λ."""
    model, batches = mlp()
    reference = in_double(model)
    losses = curve(reference, batches)
    assert losses[-4:].mean() < losses[:4].mean()  # it learns
    return losses, [module.raw_hardness.item() for module in reference.modules() if isinstance(module, Composed)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_follows_float64(in_float64, kernel):
    if (reason := KERNELS[kernel].refusal(torch.zeros(2), torch.ones(1))) is not None:
        pytest.skip(reason)
    wanted, raw_hardness = in_float64
    model, batches = mlp()
    before = [module.raw_hardness.item() for module in lambda_gelus(model)]
    with use_kernel(kernel):
        got = curve(model, batches)
    assert ((got - wanted).abs() / wanted).max() <= 1e-5
    moved = [module.raw_hardness.item() - s for module, s in zip(lambda_gelus(model), before, strict=True)]
    assert moved == pytest.approx([s - start for s, start in zip(raw_hardness, before, strict=True)], rel=3e-4)
    assert min(map(abs, moved)) > 1e-4


@pytest.mark.slow
def test_compiled_float32_follows_float64(in_float64):
    wanted, _ = in_float64
    model, batches = mlp()
    torch._dynamo.reset()
    got = curve(model, batches, forward=torch.compile(model))
    assert ((got - wanted).abs() / wanted).max() <= 1e-5
