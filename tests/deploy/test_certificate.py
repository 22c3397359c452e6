"""Bounds of the swap against loops in numpy and against inputs that were made to break them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.deploy.certificate import certify_substitution
from hf_lgelu.deploy.swap_error import bound_swap
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.models.surgery import substitute_relu

KAPPA = 0.1699712075


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inside = nn.Linear(width, width)
        self.gate = LambdaGELU(init_hardness=3.0)

    def forward(self, x):
        y = self.inside(x)
        y += x
        return self.gate(y)


def mlp(seed=0, granularity="layer"):
    torch.manual_seed(seed)
    shape = None if granularity == "layer" else (6,)
    return nn.Sequential(
        nn.Linear(4, 6), LambdaGELU(init_hardness=2.0, granularity=granularity, raw_shape=shape),
        nn.BatchNorm1d(6), nn.Linear(6, 5), nn.ReLU(inplace=True), Residual(5), nn.Dropout(0.5), nn.Linear(5, 3),
    ).eval()  # fmt: skip


def cnn(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), LambdaGELU(init_hardness=5.0), nn.AvgPool2d(2), nn.Conv2d(3, 2, 2),
        LambdaGELU(init_hardness=9.0), nn.Flatten(), nn.Linear(2, 3),
    ).eval()  # fmt: skip


def test_the_bound_is_the_product_of_absolute_matrices():
    model = mlp()
    with torch.no_grad():
        model[2].running_var.uniform_(0.2, 3)
        model[2].weight.uniform_(-2, 2)
    first, second, inner, last = (
        np.abs(module.weight.detach().double().numpy()) for module in (model[0], model[3], model[5].inside, model[7])
    )
    assert first.shape == (6, 4)
    scale = model[2].weight.detach().double().abs() / (model[2].running_var.double() + model[2].eps).sqrt()
    error = second @ (KAPPA / 2.0 * scale.numpy())
    error = last @ (inner @ error + error + KAPPA / 3.0)
    found = certify_substitution(model)
    np.testing.assert_allclose(found.logit_bounds, error, rtol=1e-6)
    assert found.bound == pytest.approx(error.max(), rel=1e-6)
    assert found.measured is None
    assert "no inputs" in str(found)


def adversarial(model, inputs):
    """Inputs driven by gradient ascent to where the swap changes the scores most."""
    soft, hard = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    substitute_relu(hard, rewrite_config=False)
    points = inputs.double().clone().requires_grad_()
    optimizer = torch.optim.Adam([points], lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        (-(soft(points) - hard(points)).abs().amax(1).sum()).backward()
        optimizer.step()
    points = points.detach()
    with torch.no_grad():
        return points, (soft(points) - hard(points)).abs()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["mlp", "neuron", "cnn"])
def test_no_input_exceeds_the_bounds(kind, seed):
    model = cnn(seed) if kind == "cnn" else mlp(seed, "neuron" if kind == "neuron" else "layer")
    inputs = torch.randn(16, 1, 6, 6) if kind == "cnn" else torch.randn(16, 4)
    points, change = adversarial(model, inputs)
    everywhere, here = certify_substitution(model).logit_bounds, bound_swap(model, points, every_input=False)[1]
    if everywhere is None:
        everywhere = certify_substitution(model, inputs[:1]).logit_bounds
    assert float(change.max()) > 1e-3
    assert bool((change <= here + 1e-12).all())
    assert bool((here <= everywhere + 1e-12).all())


def test_one_gate_is_bounded_exactly_where_the_input_is_known():
    model = nn.Sequential(nn.Linear(3, 4), LambdaGELU(init_hardness=2.0))
    points, change = adversarial(model, torch.randn(5, 3))
    torch.testing.assert_close(bound_swap(model, points, every_input=False)[1], change, atol=1e-12, rtol=0)


def test_certified_predictions_and_measurement():
    model, inputs = mlp(), torch.randn(200, 4)
    found = certify_substitution(model, inputs, batch_size=64)
    soft, hard = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    substitute_relu(hard, rewrite_config=False)
    with torch.no_grad():
        before, after = soft(inputs.double()), hard(inputs.double())
    assert found.measured == pytest.approx(float((before - after).abs().max()), rel=1e-12)
    same = (before.argmax(1) == after.argmax(1)).double().mean()
    assert found.unchanged_predictions == pytest.approx(float(same))
    scores, bounds = bound_swap(model, inputs, every_input=False)
    stays = 0
    for row, error in zip(scores.tolist(), bounds.tolist(), strict=True):
        top = int(np.argmax(row))
        stays += all(row[top] - row[j] > error[top] + error[j] for j in range(3) if j != top)
    assert found.certified_fraction == stays / 200 <= found.unchanged_predictions
    assert all(site.measured <= site.bound for site in found.sites)


def test_a_network_that_is_not_followed_is_measured():
    model = nn.Sequential(nn.Linear(4, 4), LambdaGELU(), nn.LayerNorm(4))
    found = certify_substitution(model, torch.randn(8, 4))
    assert found.bound is None
    assert "layer_norm" in found.reason
    assert found.measured > 0
    with pytest.raises(ValueError, match="no λ-GELU"):
        certify_substitution(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


class OddOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first, self.gate = nn.Linear(3, 2), nn.Linear(4, 3), LambdaGELU()

    def forward(self, x):
        return self.last(self.gate(self.first(x)))


def test_without_inputs_an_input_that_does_not_fit_is_a_reason():
    found = certify_substitution(OddOrder())
    assert found.bound is None
    assert "pass inputs" in found.reason
    assert certify_substitution(OddOrder(), torch.randn(1, 4)).bound > 0
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        certify_substitution(OddOrder(), torch.randn(1, 5))


def test_a_batch_of_the_trainer():
    torch.manual_seed(3)
    config = MLPConfig(num_features=5, hidden_size=7, num_hidden_layers=2, num_labels=3, hidden_act="lambda_gelu")
    model, features = MLPForClassification(config), torch.randn(6, 5)
    alone = certify_substitution(model, features)
    named = certify_substitution(model, {"features": features})
    assert (named.bound, named.input_bounds, named.measured) == (alone.bound, alone.input_bounds, alone.measured)
    # With labels the loss comes first; the scores are compared all the same.
    labelled = certify_substitution(model, {"features": features, "labels": torch.tensor([0, 1, 2, 0, 1, 2])})
    assert labelled.bound is None
    assert (labelled.measured, labelled.rows) == (alone.measured, 6)
    assert model.training


def test_a_transformer_is_measured():
    torch.manual_seed(4)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8, activation_function="lambda_gelu",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model, tokens = GPT2LMHeadModel(config).eval(), torch.randint(0, 11, (2, 5))
    found = certify_substitution(model, {"input_ids": tokens})
    hard = copy.deepcopy(model)
    substitute_relu(hard)
    with torch.no_grad():
        change = (model.double()(tokens).logits - hard.double()(tokens).logits).abs().max()
    assert found.bound is found.certified_fraction is None
    assert found.measured == pytest.approx(float(change), rel=1e-6)
    assert found.rows == 10
    assert "transformer.h.1.mlp.act" in str(found)


def test_a_buffer_that_is_written_into_is_not_followed():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = LambdaGELU()

        def forward(self, x):
            both = torch.empty(len(x), 8, dtype=x.dtype)
            torch.cat([self.gate(x), x], 1, out=both)
            return both

    inputs = torch.randn(3, 4)
    found = certify_substitution(Joined(), inputs)
    assert found.bound is None
    x = inputs.double()
    worst = (x * torch.special.ndtr(1.05 * x) - x.relu()).abs().max()
    assert found.measured == pytest.approx(float(worst), rel=1e-5)


def test_a_residual_connection_adds_its_bounds_and_a_sign_does_not_cancel():
    class Difference(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.scale = LambdaGELU(init_hardness=4.0), nn.Parameter(torch.tensor([-2.0, 3.0]))

        def forward(self, x):
            y = self.gate(x)
            return (5 * y.flip(1) - self.scale * y) / -2

    found = certify_substitution(Difference(), torch.randn(4, 2))
    np.testing.assert_allclose(found.logit_bounds, KAPPA / 4 * np.array([3.5, 4.0]), rtol=1e-6)
