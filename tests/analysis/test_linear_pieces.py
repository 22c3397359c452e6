"""Linear pieces against masked weight matrices multiplied by hand in numpy, and what must be refused."""

import copy
import math

import numpy as np
import pytest
import torch
from lgelu_lab.benchmarks.cifar_resnet import new_cifar_resnet
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, ViTConfig, ViTForImageClassification

from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.analysis.piecewise.linear_pieces import local_linear_model
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.models.substitution import substitute_relu


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


def test_the_cifar_resnet_is_affine_within_a_region():
    torch.manual_seed(2)
    model = new_cifar_resnet("lambda_gelu", ("a", "b", "c"), (0.5,) * 3, (0.2,) * 3).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.3, 0.3)
            module.running_var.uniform_(0.5, 2)
    substitute_relu(model)
    inputs = torch.randn(1, 3, 8, 8)
    pieces = local_linear_model(model, inputs)
    wide, direction = copy.deepcopy(model).double(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    near = inputs.double() + 1e-6 * direction
    with torch.no_grad():
        here, there = (wide(pixel_values=x).logits for x in (inputs.double(), near))
    assert pieces.same_region(near).item()
    assert len(pieces.sites) == 17
    assert pieces.pattern.shape[1] == sum(math.prod(site.shape) for site in pieces.sites)
    slope = torch.einsum("nkchw,nchw->nk", pieces.weight, near - inputs.double())
    assert float(slope.abs().max()) > 1e-9
    torch.testing.assert_close(there - here, slope, atol=1e-12, rtol=0)
    torch.testing.assert_close(pieces.apply(near), there, atol=1e-10, rtol=0)


def test_a_unit_at_its_kink_is_off():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.zero_()
        model[2].weight.copy_(torch.tensor([[3.0, 5.0]]))
        model[2].bias.fill_(7.0)
    pieces = local_linear_model(model, torch.tensor([[0.0, 1.0]]))
    assert pieces.pattern.tolist() == [[False, True]]
    assert pieces.weight.tolist() == [[[0.0, 5.0]]]
    assert pieces.bias.tolist() == [[7.0]]
    assert pieces.same_region(torch.tensor([[1e-30, 1.0]])).tolist() == [False]
    assert pieces.same_region(torch.tensor([[-4.0, 9.0]])).tolist() == [True]


class Named(nn.Module):
    """|x| and −|x|, by the key of class scores."""

    def forward(self, x):
        size = nn.functional.relu(x) + nn.functional.relu(-x)
        return {"logits": torch.cat([size, -size], -1)}


def test_scores_may_have_their_name_as_a_key():
    pieces = local_linear_model(Named(), torch.tensor([[2.0], [-3.0]]))
    assert pieces.weight.tolist() == [[[1.0], [-1.0]], [[-1.0], [1.0]]]


def test_more_rows_than_are_run_at_a_time():
    model, inputs = relu_mlp(), torch.randn(300, 5)
    pieces = local_linear_model(model, inputs, batch_size=100)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(inputs.double()).logits
    torch.testing.assert_close(pieces.scores(inputs), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(pieces.apply(inputs), expected, atol=1e-12, rtol=0)
    other = inputs.roll(1, 0)
    patterns = [masked_products(model, x.double().numpy())[2] for x in inputs]
    expected = [patterns[i] == patterns[i - 1] for i in range(300)]
    assert pieces.same_region(other).tolist() == expected
    assert 0 < sum(expected) < 300


def test_a_compiled_model_is_looked_into():
    model, inputs = relu_mlp(), torch.randn(3, 5)
    expected, found = (local_linear_model(m, inputs) for m in (model, torch.compile(model, backend="eager")))
    assert torch.equal(found.weight, expected.weight)
    assert [site.name for site in found.sites] == [site.name for site in expected.sites]


class Product(nn.Module):
    def forward(self, x):
        return x * x


class Attention(nn.Module):
    def forward(self, x):
        return x.softmax(-1)


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class IntoGiven(nn.Module):
    def forward(self, x):
        both = torch.empty(len(x), 8, dtype=x.dtype)
        torch.cat([x, x], 1, out=both)
        return both


class Thresholded(nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x, 0.1 * x)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Narrow(nn.Module):
    def forward(self, x):
        return x.float()


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
        (nn.RMSNorm(4), "pow|rms_norm"),
        (nn.GroupNorm(2, 4), "group_norm"),
        (nn.TransformerEncoderLayer(4, 1, 8, batch_first=True), "attention|encoder_layer"),
        (nn.LeakyReLU(), "leaky_relu"),
        (IntoGiven(), "cat"),
        (Thresholded(), "gt"),
        (Noisy(), "randn_like"),
        (Narrow(), "_to_copy.*float32"),
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


def test_at_a_kink_the_unit_is_off_and_the_piece_is_that_of_the_side_where_it_is_off():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        model[0].bias.copy_(torch.tensor([0.0, 1.0]))
        model[2].weight.copy_(torch.tensor([[5.0, 7.0]]))
        model[2].bias.fill_(0.5)
    inputs = torch.tensor([[0.0, 2.0], [-0.0, -1.0], [3.0, -1.0]])  # exactly 0 in front of one ReLU, of both, of one
    pieces = local_linear_model(model, inputs)
    assert pieces.pattern.tolist() == [[False, True], [False, False], [True, False]]
    assert pieces.weight.tolist() == [[[0.0, 7.0]], [[0.0, 0.0]], [[5.0, 0.0]]]
    assert pieces.bias.tolist() == [[7.5], [0.5], [0.5]]
    assert torch.equal(pieces.apply(inputs), pieces.scores(inputs))
    # f at (-1, 4), (-1, -3) and (1, -9), which lie on the sides where those units are off
    off = torch.tensor([[-1.0, 4.0], [-1.0, -3.0], [1.0, -9.0]])
    assert pieces.same_region(off).tolist() == [True, True, True]
    assert pieces.apply(off).tolist() == [[35.5], [0.5], [5.5]]
    on = torch.tensor([[1e-9, 2.0], [-1.0, -0.9], [3.0, 0.0]])
    assert pieces.same_region(on).tolist() == [False, False, False]


def test_a_network_without_relu_is_one_piece():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    pieces = local_linear_model(model, torch.randn(5, 3))
    expected = (model[1].weight.double() @ model[0].weight.double()).detach()
    torch.testing.assert_close(pieces.weight, expected.expand(5, 2, 3), rtol=0, atol=1e-14)
    assert pieces.distinct_regions == 1
    assert pieces.same_region(torch.randn(5, 3)).all()


ZEROS, ONES = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x / (1 + x.sum(1, keepdim=True)), "div in 2"),
        (lambda x: 1 / x, "reciprocal in 2"),
        (lambda x: nn.functional.normalize(x), "norm in 2"),
        (lambda x: x @ x.T, "mm in 2"),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), "div in 2"),
        (lambda x: x.clamp(min=0), "clamp in 2"),
        (lambda x: x * float(x.sum()), "_local_scalar_dense in 2"),
        (lambda x: x.round(), "round in 2"),
        (lambda x: x[:, x[0].argsort()], "sort in 2"),
        (lambda x: nn.functional.batch_norm(x.view(-1, 2, 2), None, None, training=True), "batch_norm.* in 2"),
        (lambda x: nn.functional.batch_norm(x.view(-1, 2, 2), ZEROS, ONES, training=True), "batch_norm.* in 2"),
        (lambda x: nn.functional.batch_norm(x.view(-1, 2, 2), x[0, :2], ONES), "batch_norm.* in 2"),
    ],
)
def test_the_operation_is_named_with_its_place(function, words):
    with pytest.raises(ValueError, match=words):
        local_linear_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Applied(function)), torch.randn(3, 4))


def test_division_by_a_constant_and_a_mask_are_affine():
    mask = torch.tensor([True, False, True])
    model = nn.Sequential(nn.Linear(3, 3), Applied(lambda x: -x * mask / 4 - 2))
    pieces = local_linear_model(model, torch.randn(2, 3))
    expected = (model[0].weight.double() * torch.tensor([-0.25, 0.0, -0.25])[:, None]).detach()
    torch.testing.assert_close(pieces.weight[1], expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_edges_and_chosen_numbers_are_affine(mode):
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Conv1d(2, 3, 3, padding=1, padding_mode=mode), nn.ReLU(), nn.Upsample(scale_factor=2, mode="linear"),
        Applied(lambda x: x[:, [2, 0]]), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip
    inputs = torch.randn(3, 2, 4)
    pieces = local_linear_model(model, inputs)
    wide = copy.deepcopy(model).double()
    slopes = torch.func.vmap(torch.func.jacfwd(lambda x: wide(x[None])[0]))(inputs.double())
    torch.testing.assert_close(pieces.weight, slopes, rtol=0, atol=1e-13)
    assert float(slopes.abs().max()) > 1e-2


TRANSFORMER = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "hidden_act": "relu",
}  # fmt: skip


class FromEmbeddings(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(inputs_embeds=x).last_hidden_state[:, 0]


@pytest.mark.parametrize(
    ("build", "shape", "words"),
    [
        (lambda: ViTForImageClassification(ViTConfig(**TRANSFORMER, image_size=8, patch_size=4)), (3, 8, 8),
         r"native_layer_norm in vit\..*layernorm_before"),
        (lambda: FromEmbeddings(BertModel(BertConfig(**TRANSFORMER, vocab_size=9), add_pooling_layer=False)), (4, 8),
         r"native_layer_norm in model\.embeddings\.LayerNorm"),
        (lambda: FromEmbeddings(GPT2Model(GPT2Config(
            n_layer=1, n_head=2, n_embd=8, vocab_size=9, n_positions=8, activation_function="relu", bos_token_id=0,
            eos_token_id=0))), (4, 8), r"native_layer_norm in model\.h\.0\.ln_1"),
    ],
    ids=["vit", "bert", "gpt2"],
)  # fmt: skip
def test_transformers_with_relu_are_refused_by_their_first_layer_norm(build, shape, words):
    with pytest.raises(ValueError, match=words):
        local_linear_model(build(), torch.randn(2, *shape))


def test_a_wrong_derivative_is_found_before_it_is_returned(monkeypatch):
    vmap = torch.func.vmap

    def slightly_wrong(function):
        def run(x):
            weight, scores = vmap(function)(x)
            return weight * (1 + 1e-5), scores

        return run

    monkeypatch.setattr("hf_lgelu.analysis.piecewise.linear_pieces.vmap", slightly_wrong)
    with pytest.raises(RuntimeError, match=r"differs from the network by .* within a region"):
        local_linear_model(relu_mlp(), torch.randn(3, 5))


def test_no_more_than_batch_size_rows_run_at_a_time_and_the_inputs_stay():
    seen = []

    class Recorded(nn.Module):
        def forward(self, x):
            seen.append(len(x))
            return x

    model, inputs = nn.Sequential(nn.ReLU(inplace=True), Recorded(), nn.Linear(3, 2)), torch.randn(11, 3).double()
    before = inputs.clone()
    pieces = local_linear_model(model, inputs, batch_size=4)
    assert max(seen) == 4
    assert torch.equal(inputs, before)
    assert torch.equal(pieces.pattern, before > 0)
    expected = model[2].weight.detach().double() * (before > 0)[:, None]
    torch.testing.assert_close(pieces.weight, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_to_blame(number):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    nn.init.constant_(model[2].bias, number)
    with pytest.raises(ValueError, match="gives NaN or infinity on these inputs; look at its weights"):
        local_linear_model(model, torch.randn(4, 3))


@pytest.mark.parametrize(
    ("outputs", "message"), [(2, r"of any number of rows, got shape \(2,\) of one"), (0, r"got shape \(5, 0\)")]
)
def test_scores_without_an_axis_of_rows_or_of_outputs_are_refused(outputs, message):
    class Squeezed(nn.Sequential):
        def forward(self, x):
            return super().forward(x).squeeze()

    with pytest.raises(ValueError, match=message):
        local_linear_model(Squeezed(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, outputs)), torch.randn(5, 3))
