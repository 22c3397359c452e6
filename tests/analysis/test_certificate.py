"""Bounds of the swap against loops in numpy and against inputs that were made to break them."""

import copy

import mpmath
import numpy as np
import pytest
import torch
from lgelu_lab.benchmarks.cifar_resnet import ARCHITECTURE
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TimmWrapperConfig, TimmWrapperForImageClassification

from hf_lgelu import initialize_hardness
from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.analysis.piecewise.certificate import SiteCertificate, SubstitutionCertificate, certify_substitution
from hf_lgelu.analysis.piecewise.swap_error import bound_swap
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.models.substitution import substitute_relu

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


def mlp(seed=0, shape=(1,)):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 6), LambdaGELU(init_hardness=2.0, raw_shape=shape),
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
@pytest.mark.parametrize("kind", ["mlp", "channel", "cnn"])
def test_no_input_exceeds_the_bounds(kind, seed):
    model = cnn(seed) if kind == "cnn" else mlp(seed, (6,) if kind == "channel" else (1,))
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
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(4, 6), LambdaGELU(init_hardness=5.0), nn.Linear(6, 3))
    inputs = torch.randn(200, 4)
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
    assert 0.2 < found.certified_fraction == stays / 200 < found.unchanged_predictions
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


def test_kappa_is_the_largest_distance_of_x_phi_from_relu():
    u = mpmath.findroot(lambda u: mpmath.ncdf(-u) - u * mpmath.npdf(u), 0.75)  # where u·Φ(−u) is flat
    model = nn.Sequential(nn.Linear(1, 1), LambdaGELU(init_hardness=7.0))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.zero_()
    found = certify_substitution(model, torch.tensor([[float(u) / 7], [-float(u) / 7], [0.0]]))
    expected = float(u * mpmath.ncdf(-u) / 7)
    assert found.bound == pytest.approx(expected, rel=1e-6)  # λ itself is kept in float32
    assert found.sites[0].bound == pytest.approx(expected, rel=1e-6)
    assert found.measured == pytest.approx(expected, rel=1e-6)
    assert found.measured <= found.bound * (1 + 1e-12)


def test_every_channel_is_bounded_by_its_own_hardness():
    torch.manual_seed(5)
    gate = LambdaGELU(raw_shape=(3, 1, 1))
    with torch.no_grad():
        gate.raw_hardness.copy_(torch.tensor([0.0, 2.0, 30.0]).reshape(3, 1, 1))
    model = nn.Sequential(nn.Conv2d(2, 3, 3), gate, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 2)).eval()
    found = certify_substitution(model, torch.randn(2, 2, 6, 6))
    hardness = gate.hardness.flatten().tolist()
    assert hardness[1] > 1.1 * hardness[0] > 1
    assert hardness[2] > 5 * hardness[1]
    weight = model[4].weight.detach().double().abs().reshape(2, 3, 4)
    expected = sum(KAPPA / hardness[c] * weight[:, c].sum(1) for c in range(3))
    np.testing.assert_allclose(found.logit_bounds, expected, rtol=1e-6)
    assert found.sites[0].smallest_hardness == pytest.approx(hardness[0])
    assert found.sites[0].bound == pytest.approx(KAPPA / hardness[0])


def test_a_gate_at_two_places_has_one_error_and_two_rows():
    torch.manual_seed(7)
    gate = LambdaGELU(init_hardness=3.0)
    model, inputs = nn.Sequential(nn.Linear(3, 4), gate, nn.Linear(4, 4), gate), torch.randn(30, 3)
    found = certify_substitution(model, inputs)
    with torch.no_grad():
        first = model[0].double()(inputs.double())
        between = model[2].double()(first * torch.special.ndtr(3 * first))
    worst = max(float((x * torch.special.ndtr(3 * x) - x.relu()).abs().max()) for x in (first, between))
    assert [site.measured for site in found.sites] == pytest.approx([worst, worst], rel=1e-5)
    assert found.bound == pytest.approx(KAPPA / 3 * (1 + float(model[2].weight.detach().abs().sum(1).max())), rel=1e-6)


@torch.no_grad()
def test_the_cifar_resnet_has_a_bound_that_covers_what_is_measured():
    torch.manual_seed(8)
    config = TimmWrapperConfig(
        architecture=ARCHITECTURE, model_args={"act_layer": "lambda_gelu", "channels": [4, 4, 8, 8]}, num_labels=3
    )
    model = TimmWrapperForImageClassification(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 1.4 / parameter[0].numel() ** 0.5)
    initialize_hardness(model, "increasing", 20.0, 160.0)
    found = certify_substitution(model, torch.randn(8, 3, 16, 16))
    assert len(found.sites) == 17
    assert found.bound >= found.input_bounds >= found.measured > 1e-5
    assert found.certified_fraction <= found.unchanged_predictions
    assert all(0 < site.measured <= site.bound for site in found.sites)


def test_a_mask_takes_its_units_out_of_the_bound():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gate, self.last = nn.Linear(2, 3), LambdaGELU(init_hardness=2.0), nn.Linear(3, 1)

        def forward(self, x):
            return self.last(self.gate(self.first(x)) * torch.tensor([True, False, True]))

    model = Masked()
    weight = model.last.weight.detach().abs()[0]
    assert certify_substitution(model).bound == pytest.approx(KAPPA / 2 * float(weight[0] + weight[2]), rel=1e-6)


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


SIGNS = torch.tensor([[1.0], [-1.0], [1.0], [-1.0], [1.0]], dtype=torch.float64)


def bounds_of(function, *, rows=2):
    """Of the numbers that `function` makes of three gates of hardness 5."""
    model = nn.Sequential(LambdaGELU(init_hardness=5.0), Applied(function))
    return certify_substitution(model, torch.randn(rows, 3))


@pytest.mark.parametrize(
    ("function", "factors"),
    [
        (lambda y: torch.add(y, y.flip(1), alpha=-2), [3, 3, 3]),
        (lambda y: torch.sub(y, y.flip(1), alpha=0.5), [1.5, 1.5, 1.5]),
        (lambda y: nn.functional.pad(y, (1, 2), value=7.0), [0, 1, 1, 1, 0, 0]),
        (lambda y: torch.stack([y, -y], 1).sum(1), [2, 2, 2]),
        (lambda y: y.mean(1, keepdim=True), [1]),
        (lambda y: y - 100, [1, 1, 1]),
        (lambda y: y @ torch.tensor([[1.0, -1.0], [2.0, 0.0], [-3.0, 0.5]], dtype=y.dtype), [6, 1.5]),
        (lambda y: torch.cat([y[:, :1], torch.ones(len(y), 2, dtype=y.dtype)], 1), [1, 0, 0]),
        (lambda y: y[:, [0, 0, 2]] - y.index_select(1, torch.tensor([1, 1, 2])), [2, 2, 2]),
        (lambda y: nn.functional.pad(y[:, None], (2, 0), mode="reflect")[:, 0] @ SIGNS, [5]),
        (lambda y: nn.functional.pad(y[:, None], (0, 2), mode="replicate")[:, 0] @ SIGNS, [5]),
        (lambda y: -nn.functional.interpolate(y[:, None], 5)[:, 0].roll(1, 1), [1, 1, 1, 1, 1]),
        (lambda y: nn.functional.interpolate(y[:, None, None], (1, 5), mode="bilinear")[:, 0, 0] @ SIGNS, [5]),
        (lambda y: y.repeat(1, 2)[:, :5] @ SIGNS, [5]),
    ],
)
def test_each_operation_carries_the_absolute_values_of_its_coefficients(function, factors):
    found = bounds_of(function)
    np.testing.assert_allclose(found.logit_bounds, KAPPA / 5 * np.array(factors, dtype=float), rtol=1e-6)


def test_what_is_written_under_a_view_is_not_followed():
    def written(y):
        part = y[:, :2]
        y += 1
        return torch.cat([y, part], 1)

    found = bounds_of(written)
    assert found.bound is None
    assert "in place; not followed" in found.reason
    assert found.measured > 0


def test_a_relu_that_is_off_stops_what_came_before():
    model = nn.Sequential(LambdaGELU(init_hardness=5.0), Applied(lambda y: y - 50), nn.ReLU())
    found = certify_substitution(model, torch.randn(4, 3))
    assert found.bound == pytest.approx(KAPPA / 5, rel=1e-6)
    assert found.input_bounds == 0


def test_every_batch_counts():
    model, inputs = mlp(), torch.randn(30, 4).sort(0, descending=True).values
    whole = certify_substitution(model, inputs)
    for order in (inputs, inputs.flip(0)):
        parts = certify_substitution(model, order, batch_size=7)
        assert parts.input_bounds == pytest.approx(whole.input_bounds, rel=1e-12)
        assert parts.measured == pytest.approx(whole.measured, rel=1e-12)
        assert [site.measured for site in parts.sites] == pytest.approx([s.measured for s in whole.sites], rel=1e-12)
        assert (parts.rows, parts.certified_fraction) == (30, whole.certified_fraction)


def test_nothing_is_said_of_no_rows_or_of_nan():
    model = nn.Sequential(nn.Linear(4, 4), LambdaGELU())
    with pytest.raises(ValueError, match=r"N ≥ 1, got \(0, 4\)"):
        certify_substitution(model, torch.ones(0, 4))
    with pytest.raises(ValueError, match="hold NaN"):
        certify_substitution(model, torch.tensor([[1.0, 2.0, torch.nan, 0.0]]))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="output holds NaN or infinity"):
        certify_substitution(model, torch.ones(2, 4))


def single(width=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), LambdaGELU(init_hardness=1.05), nn.Linear(16, width)).eval()


@pytest.mark.parametrize("score_axis", [True, False])
def test_of_a_single_score_no_class_is_certified(score_axis):
    """It said that all predictions stay where the sign, which is the class, turned round."""
    model, inputs = single(), torch.randn(512, 4)
    if not score_axis:
        model.append(nn.Flatten(0))
    found = certify_substitution(model, inputs, batch_size=100)
    before = model(inputs)
    substitute_relu(model)
    assert ((before > 0) != (model(inputs) > 0)).any()
    assert (found.certified_fraction, found.unchanged_predictions, found.rows) == (None, None, 512)
    assert found.measured == pytest.approx((before - model(inputs)).abs().max().item(), rel=1e-5)
    assert found.measured <= found.input_bounds
    assert "on 512 rows of one score or of a map, no known class each" in str(found)
    assert "predictions" not in str(found)


class Summed(nn.Module):
    """Scores of a whole sequence: the sum over its rows."""

    def __init__(self, always):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(3, 5), LambdaGELU(init_hardness=2.0), nn.Linear(5, 2)
        self.always = always

    def forward(self, x):
        hidden = self.gate(self.first(x))
        return self.last(hidden.sum(-2) if self.always or x.ndim > 2 else hidden)


@pytest.mark.parametrize("always", [True, False])
def test_without_inputs_there_is_no_bound_where_it_depends_on_how_many_rows_there_are(always):
    torch.manual_seed(0)
    model = Summed(always)
    found = certify_substitution(model)
    assert found.bound is None
    assert "the bound depends on the shape of an input; pass inputs" in found.reason
    inputs = torch.randn(8, 50, 3)
    told = certify_substitution(model, inputs)
    absolute = model.last.weight.abs().double() @ torch.full((5,), 50 * KAPPA / 2.0, dtype=torch.float64)
    torch.testing.assert_close(told.logit_bounds, absolute, rtol=1e-6, atol=0)
    assert told.measured <= told.input_bounds <= told.bound


def test_rows_of_any_number_of_axes_have_one_bound():
    model = single(3)
    found = certify_substitution(model)
    of_rows = certify_substitution(model, torch.randn(2, 7, 4)).logit_bounds
    assert of_rows.shape == (7, 3)
    torch.testing.assert_close(of_rows, found.logit_bounds.expand(7, 3))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bound_that_is_no_number_is_none(value):
    model = single(3)
    model[2].weight.data[0, 0] = value
    found = certify_substitution(model)
    assert found.bound is None
    assert "not finite; look at the model's weights" in found.reason


def test_nan_among_several_inputs_is_refused():
    config = MLPConfig(num_features=3, hidden_size=6, num_hidden_layers=1, num_labels=2, hidden_act="lambda_gelu")
    inputs = {"features": torch.tensor([[1.0, torch.nan, 0.0]]), "labels": torch.tensor([0])}
    with pytest.raises(ValueError, match="inputs hold NaN"):
        certify_substitution(MLPForClassification(config), inputs)


def test_scores_without_an_axis_of_rows_are_bounded_whole():
    torch.manual_seed(0)

    class Squeezed(nn.Sequential):
        def forward(self, x):
            return super().forward(x).squeeze()

    model = Squeezed(nn.Linear(4, 4), LambdaGELU(init_hardness=2.0), nn.Linear(4, 2))
    with torch.no_grad():
        model[2].weight[1] *= 100
    found = certify_substitution(model, torch.randn(64, 4))
    expected = KAPPA / 2 * model[2].weight.detach().double().abs().sum(1)
    assert torch.allclose(found.logit_bounds, expected)
    assert found.bound / 3 < found.measured <= found.bound


class TimeFirst(nn.Module):
    """Scores of shape (time, rows, classes)."""

    def __init__(self):
        super().__init__()
        self.gate, self.conv = LambdaGELU(init_hardness=2.0), nn.Conv1d(1, 2, 5, padding=2, bias=False)
        nn.init.ones_(self.conv.weight)

    def forward(self, x):
        return self.conv(self.gate(x)).permute(2, 0, 1)


def test_the_first_axis_of_scores_need_not_count_rows():
    found = certify_substitution(TimeFirst(), torch.full((1, 1, 9), -0.75179 / 2))
    assert found.logit_bounds.shape == (9, 1, 2)
    assert found.bound == pytest.approx(5 * KAPPA / 2)
    assert found.measured == pytest.approx(found.bound, rel=1e-6)  # the worst input, and five of it


def test_a_sum_over_rows_that_gives_as_many_classes_as_rows_were_tried():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.gate, self.down = nn.Linear(4, 8), LambdaGELU(init_hardness=3.0), nn.Linear(8, 13)

        def forward(self, x):
            return self.down(self.gate(self.up(x)).sum(-2))

    found = certify_substitution(Pooled())
    assert found.bound is None
    assert "depends on the shape of an input" in found.reason


def test_rows_that_depend_on_each_other_have_no_bound():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.down = LambdaGELU(init_hardness=2.0), nn.Linear(1, 2, bias=False)

        def forward(self, x):
            return self.down(self.gate(x).sum(0, keepdim=True).expand(x.shape))

    found = certify_substitution(Shared(), torch.full((6, 1), -0.75179 / 2))
    assert found.bound is found.input_bounds is found.certified_fraction is None
    assert "they depend on each other" in found.reason
    assert found.measured > 0


def test_no_class_is_certified_along_a_map():
    class Segmented(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.conv = LambdaGELU(init_hardness=2.0), nn.Conv2d(1, 2, 1)
            self.register_buffer("ramp", torch.arange(4.0) * 5)
            with torch.no_grad():
                self.conv.weight[:] = torch.tensor([1.0, -1.0]).view(2, 1, 1, 1)
                self.conv.bias[:] = torch.tensor([0.1, 0.0])

        def forward(self, x):
            return self.conv(self.gate(x)) + self.ramp

    model, inputs = Segmented(), torch.full((4, 1, 4, 4), -0.75179 / 2)
    before = model(inputs).argmax(1)
    found = certify_substitution(model, inputs)
    substitute_relu(model)
    assert not (before == model(inputs).argmax(1)).any()  # every pixel has another class
    assert found.certified_fraction is found.unchanged_predictions is None
    assert found.bound == pytest.approx(KAPPA / 2)
    assert "rows of one score or of a map, no known class each" in str(found)


def test_what_is_measured_is_what_is_bounded():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.gate, self.down = nn.Linear(3, 4), LambdaGELU(init_hardness=2.0), nn.Linear(4, 2)

        def forward(self, x):
            hidden = self.gate(self.up(x))
            return {"features": hidden * 50, "logits": self.down(hidden)}

    torch.manual_seed(0)
    model, inputs = Two(), torch.randn(64, 3)
    before = model(inputs)["logits"]
    found = certify_substitution(model, inputs)
    substitute_relu(model)
    assert found.measured == pytest.approx((before - model(inputs)["logits"]).abs().max().item(), rel=1e-4)
    assert found.measured <= found.input_bounds <= found.bound


def test_all_but_one_of_many_predictions_are_not_said_to_be_all():
    share = 1 - 1 / 40000
    sites = (SiteCertificate("act", 160.0, 0.001, 0.001),)
    *_, stay, measured = str(SubstitutionCertificate(sites, None, "x", 0.1, share, 0.3, share, 40000)).splitlines()
    assert stay == "predictions that provably stay: 99.99 %"
    assert measured == "measured: 0.3; 99.99 % of 40000 predictions equal"
