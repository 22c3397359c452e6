"""Linear pieces against masked weight matrices multiplied by hand in numpy, and what must be refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.deploy.linear_pieces import local_linear_model
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification


def relu_mlp():
    torch.manual_seed(0)
    config = MLPConfig(num_features=5, hidden_size=7, num_hidden_layers=3, hidden_act="relu", num_labels=3)
    return MLPForClassification(config)


def masked_products(model, x):
    """W, b and pattern of one input, by multiplying masked matrices."""
    weight, bias, pattern = np.eye(len(x)), np.zeros(len(x)), []
    for layer in model.layers:
        matrix = layer.linear.weight.detach().double().numpy()
        weight, bias = matrix @ weight, matrix @ bias + layer.linear.bias.detach().double().numpy()
        on = weight @ x + bias > 0
        weight, bias = weight * on[:, None], bias * on
        pattern += on.tolist()
    matrix = model.classifier.weight.detach().double().numpy()
    return matrix @ weight, matrix @ bias + model.classifier.bias.detach().double().numpy(), pattern


def test_the_mlps_pieces_are_products_of_masked_matrices():
    model, inputs = relu_mlp(), torch.randn(9, 5)
    before = copy.deepcopy(model.state_dict())
    pieces = local_linear_model(model, inputs, batch_size=4)
    expected = [masked_products(model, x.double().numpy()) for x in inputs]
    np.testing.assert_allclose(pieces.weight, [w for w, _, _ in expected], atol=1e-13, rtol=0)
    np.testing.assert_allclose(pieces.bias, [b for _, b, _ in expected], atol=1e-13, rtol=0)
    assert pieces.pattern.tolist() == [pattern for _, _, pattern in expected]
    assert pieces.distinct_regions == len({tuple(pattern) for _, _, pattern in expected})
    assert [(s.name, s.columns) for s in pieces.sites] == [
        (f"layers.{i}.activation", slice(7 * i, 7 * i + 7)) for i in range(3)
    ]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    moved = inputs + 0.3 * torch.randn(9, 5)
    same = [masked_products(model, z.double().numpy())[2] == p for z, (_, _, p) in zip(moved, expected, strict=True)]
    assert pieces.same_region(moved).tolist() == same
    assert 0 < sum(same) < 9


def small_cnn(gate):
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), gate, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 4))


def test_a_convolutional_network_is_affine_within_a_region():
    torch.manual_seed(1)
    model, inputs = small_cnn(nn.ReLU(inplace=True)), torch.randn(6, 2, 6, 6)
    model(inputs)  # statistics of batch norm
    pieces = local_linear_model(model, inputs)
    near = inputs.double() + 1e-4 * torch.randn(6, 2, 6, 6, dtype=torch.float64)
    inside = pieces.same_region(near)
    assert int(inside.sum()) >= 3
    with torch.no_grad():
        expected = copy.deepcopy(model).double().eval()(near)
    assert float((pieces.apply(near) - expected)[inside].abs().max()) < 1e-10


class Product(nn.Module):
    def forward(self, x):
        return x * x


class Attention(nn.Module):
    def forward(self, x):
        return x.softmax(-1)


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (LambdaGELU(), "smooth.*erf"),
        (nn.GELU(), "smooth.*gelu"),
        (nn.Tanh(), "smooth.*tanh"),
        (nn.LayerNorm(4), "layer_norm"),
        (Attention(), "softmax"),
        (Product(), "mul"),
        (Branch(), "gt|_local_scalar_dense"),
        (nn.MaxPool1d(2), "max"),
        (nn.ReLU6(), "hardtanh"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_affine_or_relu_is_refused(layer, words):
    with pytest.raises(ValueError, match=words):
        local_linear_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), layer), torch.randn(3, 4))


def test_rows_that_depend_on_each_other_are_refused():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    with pytest.raises(RuntimeError, match="other inputs of its batch"):
        local_linear_model(nn.Sequential(nn.Linear(4, 4), Centred()), torch.randn(3, 4))


def test_wrong_inputs():
    with pytest.raises(TypeError, match="int64"):
        local_linear_model(relu_mlp(), torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="NaN"):
        local_linear_model(relu_mlp(), torch.full((2, 5), torch.nan))
    with pytest.raises(ValueError, match="one for each piece"):
        local_linear_model(relu_mlp(), torch.ones(2, 5)).apply(torch.ones(3, 5))
