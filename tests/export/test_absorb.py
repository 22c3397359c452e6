"""λ absorbed by weights: closed forms for the weights, float64 for the function, and what must be refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from hf_lgelu import LambdaGELU, MLPConfig, MLPForClassification, replace_activations
from hf_lgelu.export.absorption.absorb import absorb_hardness
from hf_lgelu.networks.sites import find_sites

HARDNESS = (1.5, 3.0, 20.0)


def harden(model, values=HARDNESS):
    """Another λ at every site, far from 1; several λ of one site differ as well."""
    for index, module in enumerate(m for m in model.modules() if isinstance(m, LambdaGELU)):
        spread = torch.linspace(1, 2, module.raw_hardness.numel()).reshape(module.raw_hardness.shape)
        module.hardness_override.copy_(values[index % len(values)] * spread)
    return model


@torch.no_grad()
def computed(model, inputs):
    return model.eval()(inputs)


def assert_folds(model, inputs, sites):
    """λ is absorbed in float64, and the function stays: not so if GELU alone took the place."""
    model, inputs = model.double().eval(), inputs.double()
    before = computed(model, inputs)
    report = absorb_hardness(model, inputs)
    after = computed(model, inputs)
    assert len(report) == sites
    assert find_sites(model, ("lambda_gelu",)) == []
    assert (after - before).abs().max() <= 1e-12 * before.abs().max()
    return report


def assert_refused(model, inputs, reasons):
    """Refuses exactly these sites, each with its reason, and changes nothing."""
    model.eval()
    state, modules = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    with pytest.raises(ValueError, match="cannot become a plain GELU model") as caught:
        absorb_hardness(model, inputs)
    lines = [line.strip().split(": ", 1) for line in str(caught.value).split("\n")[1:-1]]
    assert [name for name, _ in lines] == list(reasons)
    for (_, said), reason in zip(lines, reasons.values(), strict=True):
        assert reason in said
    assert "export_relu" in str(caught.value)
    assert {name: id(module) for name, module in model.named_modules()} == {n: id(m) for n, m in modules.items()}
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_weights_of_a_chain():
    model = harden(
        nn.Sequential(nn.Linear(3, 4), LambdaGELU(), nn.Linear(4, 5), LambdaGELU(), nn.Linear(5, 2))
    ).double()
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = absorb_hardness(model, torch.ones(2, 3).double())
    expected = {
        "0.weight": old["0.weight"] * 1.5,
        "0.bias": old["0.bias"] * 1.5,
        "2.weight": old["2.weight"] * 3 / 1.5,
        "2.bias": old["2.bias"] * 3,
        "4.weight": old["4.weight"] / 3,
        "4.bias": old["4.bias"],
    }
    new = model.state_dict()
    assert new.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(new[name], tensor, rtol=1e-15, atol=0)
    assert [type(module) for module in model] == [nn.Linear, nn.GELU, nn.Linear, nn.GELU, nn.Linear]
    assert model[1].approximate == "none"
    assert [(s.name, s.hardness, s.multiplied, s.divided) for s in report.sites] == [
        ("1", (1.5,), ("0.weight",), ("2.weight",)),
        ("3", (3.0,), ("2.weight",), ("4.weight",)),
    ]
    assert "1: λ = 1.5, 0.weight × λ, 2.weight / λ" in str(report)


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)
        self.act = LambdaGELU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class BothGated(Gated):
    def __init__(self):
        super().__init__()
        self.other = LambdaGELU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.other(self.up(x)))


class Handwritten(nn.Module):
    """Weights that belong to no layer: x·W + b, with a gain before the activation."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 4))
        self.bias, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(2, 1))
        self.act = LambdaGELU()

    def forward(self, x):
        hidden = self.act(x @ self.first + self.bias)
        return self.second @ hidden.t() + self.shift


class RootMeanSquare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.act, self.out = nn.Parameter(torch.rand(3) + 0.5), LambdaGELU(), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.act(self.scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))))


class Repeated(nn.Module):
    """ALBERT: the same layer three times."""

    def __init__(self):
        super().__init__()
        self.layer = Residual(nn.Sequential(nn.Linear(3, 4), LambdaGELU(), nn.Linear(4, 3)))

    def forward(self, x):
        return self.layer(self.layer(self.layer(x)))


class Rearranged(nn.Module):
    """Everything that a factor goes through between a layer and the next."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, 8), LambdaGELU(), nn.Conv1d(2, 3, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        hidden = self.act(self.dropout(self.first(x).reshape(-1, 2, 4).transpose(1, 2))[:, :3].contiguous())
        hidden = -F.pad(hidden.permute(0, 2, 1), (1, 0)) / 3
        return self.last(F.max_pool1d(hidden, 2)).mean(-1)


def normalized(norm):
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, LambdaGELU(), nn.AvgPool2d(2), nn.Conv2d(4, 2, 2), nn.Flatten())


def with_statistics(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model


FOLDS = {
    "conv1d-of-transformers": (lambda: nn.Sequential(Conv1D(4, 3), LambdaGELU(), Conv1D(2, 4)), (5, 3), 1),
    "batch-norm": (lambda: normalized(nn.BatchNorm2d(4)), (2, 3, 8, 8), 1),
    "group-norm": (lambda: normalized(nn.GroupNorm(2, 4)), (2, 3, 8, 8), 1),
    "layer-norm": (lambda: nn.Sequential(nn.LayerNorm(3), LambdaGELU(), nn.Linear(3, 2)), (5, 3), 1),
    "root-mean-square": (RootMeanSquare, (5, 3), 1),
    "residual-around": (lambda: Residual(nn.Sequential(nn.Linear(3, 4), LambdaGELU(), nn.Linear(4, 3))), (5, 3), 1),
    "gated": (Gated, (5, 3), 1),
    "both-gated": (BothGated, (5, 3), 2),
    "handwritten": (Handwritten, (5, 3), 1),
    "repeated": (Repeated, (5, 3), 1),
    "rearranged": (Rearranged, (5, 3), 1),
    "transposed-convolution": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 2), LambdaGELU(), nn.ConvTranspose2d(4, 6, 2, groups=2)),
        (2, 3, 4, 4),
        1,
    ),
}


@pytest.mark.parametrize("name", FOLDS)
def test_the_function_stays_in_float64(name):
    build, shape, sites = FOLDS[name]
    model, inputs = harden(with_statistics(build())), torch.randn(shape)
    soft_model = copy.deepcopy(model).double()
    before = computed(soft_model, inputs.double())
    for site in find_sites(soft_model):
        site.put(nn.GELU())
    assert (computed(soft_model, inputs.double()) - before).abs().max() > 1e-3 * before.abs().max()
    assert_folds(model, inputs, sites)


PER_CHANNEL = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2)), (5, 3)),
    "batch-norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 2, 2)),
        (2, 3, 8, 8),
    ),
    "group-norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 2, 2)), (2, 4, 8, 8)),
    "grouped": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.GELU(), nn.Conv2d(8, 12, 2, groups=4)),
        (2, 4, 8, 8),
    ),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.GELU(), nn.Conv2d(4, 4, 2, groups=4)), (2, 3, 8, 8)),
    "pooled-and-flat": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GELU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
        ),
        (2, 3, 8, 8),
    ),
    "moved": (lambda: Moved(), (2, 3, 4, 4)),
}


class Moved(nn.Module):
    """ConvNeXt's way: channels last before the activation, and back for the next convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, 5), nn.GELU(), nn.Conv2d(5, 2, 1)

    def forward(self, x):
        hidden = self.act(self.first(x.permute(0, 2, 3, 1)))
        return self.last(hidden.permute(0, 3, 1, 2)).mean((2, 3))


@pytest.mark.parametrize("name", PER_CHANNEL)
def test_a_hardness_per_channel(name):
    build, shape = PER_CHANNEL[name]
    inputs = torch.randn(shape)
    model = with_statistics(build())
    sites = len(replace_activations(model, granularity="channel", inputs=inputs))
    assert all(module.raw_hardness.numel() > 1 for module in model.modules() if isinstance(module, LambdaGELU))
    report = assert_folds(harden(model), inputs, sites)
    assert len(report.sites[0].hardness) > 1


def test_channels_that_a_reshape_mixes_are_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    inputs = torch.randn(2, 3, 8, 8)
    assert_folds(harden(replaced(copy.deepcopy(model), inputs, "layer")), inputs, 1)
    assert_refused(replaced(model, inputs, "channel"), inputs, {"1": "do not get through flatten in 2"})


def replaced(model, inputs, granularity):
    replace_activations(model, granularity=granularity, inputs=inputs)
    return model


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("layers", [(nn.Linear(4, 4), nn.Conv1d(4, 2, 1)), (nn.Conv1d(4, 4, 1), nn.Linear(4, 2))])
def test_both_layers_must_have_their_channels_where_lambda_has_its_own(layers, axis):
    model = nn.Sequential(layers[0], nn.GELU(), layers[1])  # as many positions as channels
    replace_activations(model, granularity="channel", inputs=torch.ones(2, 4, 4), channel_axis=axis)
    assert_refused(model, torch.ones(2, 4, 4), {"1": "its 4 factors are not those of the channels of"})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, 3), LambdaGELU(), nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.head.weight = self.first.weight

    def forward(self, x):
        return self.head(self.last(self.act(self.first(x))))


class TiedAside(Tied):
    """The other module with the same weight does not run here, and could elsewhere."""

    def forward(self, x):
        return self.last(self.act(self.first(x)))


class Recurrent(nn.Module):
    """The first call of the layer has no activation before it, and the last has none after it."""

    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(3, 3), LambdaGELU()

    def forward(self, x):
        return self.layer(self.act(self.layer(x)))


class WithTwoUses(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, 3), LambdaGELU(), nn.Linear(3, 3)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(self.act(hidden)) * hidden.sigmoid()


class InPlaceOnAView(WithTwoUses):
    def forward(self, x):
        hidden = self.act(self.first(x))
        hidden.view(-1).add_(1)
        return self.last(hidden)


class InputChanged(WithTwoUses):
    def forward(self, x):
        hidden = self.first(x)
        hidden.view(-1).add_(1)
        return self.last(self.act(hidden))


class HalfOfALayer(WithTwoUses):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 6)

    def forward(self, x):
        gate, up = self.first(x).chunk(2, -1)
        return self.last(self.act(gate) * up)


class Unreached(WithTwoUses):
    def forward(self, x):
        return self.last(self.first(x))


REFUSED = {
    "behind-a-sum": (
        lambda: nn.Sequential(Residual(nn.Linear(3, 3)), LambdaGELU(), nn.Linear(3, 2)),
        {"1": "its input comes from add in 0, which is no layer"},
    ),
    "before-a-sum": (
        lambda: nn.Sequential(Residual(nn.Sequential(nn.Linear(3, 3), LambdaGELU())), nn.Linear(3, 2)),
        {"0.inner.1": "its output goes into add in 0, which is no layer"},
    ),
    "into-two": (
        lambda: nn.Sequential(nn.Linear(3, 3), LambdaGELU(), Residual(nn.Linear(3, 3))),
        {"1": "goes to 2 places (linear in 2.inner and add in 2)"},
    ),
    "first": (lambda: nn.Sequential(LambdaGELU(), nn.Linear(3, 2)), {"0": "its input comes from the input "}),
    "last": (lambda: nn.Sequential(nn.Linear(3, 2), LambdaGELU()), {"1": "its output goes into the model's output"}),
    "adjacent": (
        lambda: nn.Sequential(nn.Linear(3, 2), LambdaGELU(), LambdaGELU(), nn.Linear(2, 2)),
        {"1": "goes into an activation in 2", "2": "comes from an activation in 1"},
    ),
    "before-a-norm": (
        lambda: nn.Sequential(nn.Linear(3, 3), LambdaGELU(), nn.LayerNorm(3), nn.Linear(3, 2)),
        {"1": "layer_norm in 2, which is no layer that can be divided"},
    ),
    "norm-without-scale": (
        lambda: nn.Sequential(nn.LayerNorm(3, elementwise_affine=False), LambdaGELU(), nn.Linear(3, 2)),
        {"1": "layer_norm in 0, which is no layer with a weight of its own"},
    ),
    "before-sigmoid": (
        lambda: nn.Sequential(nn.Linear(3, 3), LambdaGELU(), nn.Sigmoid(), nn.Linear(3, 2)),
        {"1": "into sigmoid in 2"},
    ),
    "tied": (Tied, {"act": "first.weight, which would have to be scaled, is also used by linear in head"}),
    "tied-aside": (TiedAside, {"act": "belongs to several modules"}),
    "recurrent": (
        Recurrent,
        {"act": "layer.weight, which would have to be scaled, is used 2 times, with another factor each time"},
    ),
    "input-used-again": (WithTwoUses, {"act": "linear in first, on the way to it, is also used by sigmoid"}),
    "in-place-on-a-view": (InPlaceOnAView, {"act": "goes into add, which is no layer"}),
    "input-changed-through-a-view": (InputChanged, {"act": "its input comes from add, which is no layer"}),
    "half-of-a-layer": (HalfOfALayer, {"act": "its input comes from one part of chunk"}),
    "unreached": (Unreached, {"act": "never reach it"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_absorbed_is_named_with_its_reason(name):
    build, reasons = REFUSED[name]
    assert_refused(harden(build()), torch.randn(5, 3), reasons)


class Branching(WithTwoUses):
    def forward(self, x):
        hidden = self.act(self.first(x))
        return self.last(hidden) if hidden.sum() > 0 else hidden


def test_a_model_that_branches_on_values_is_refused_and_left_as_it_was():
    model = Branching()
    with pytest.raises(ValueError, match="decides by values after a gate"):
        absorb_hardness(model, torch.ones(2, 3))
    assert isinstance(model.act, LambdaGELU)


def assert_as_it_was(model, inputs, said):
    model.eval()
    state, gates, before = copy.deepcopy(model.state_dict()), find_sites(model), computed(model, inputs)
    with pytest.raises(ValueError, match=said):
        absorb_hardness(model, inputs)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [site.module for site in find_sites(model)] == [site.module for site in gates]
    assert torch.equal(computed(model, inputs), before)


@pytest.mark.parametrize("of", ["weight", "bias"])
def test_two_parameters_in_one_memory_do_not_absorb_hardness(of):
    model = harden(nn.Sequential(nn.Linear(3, 3), LambdaGELU(), nn.Linear(3, 3), LambdaGELU(), nn.Linear(3, 3))).eval()
    model[4].get_parameter(of).data = model[0].get_parameter(of).data
    assert_as_it_was(model, torch.randn(5, 3), rf"0\.{of}, which would have to be scaled, .*or its memory does")


def test_bfloat16_weights_are_rounded_once():
    model = harden(
        nn.Sequential(nn.Linear(3, 4), LambdaGELU(), nn.Linear(4, 3), LambdaGELU(), nn.Linear(3, 2))
    ).bfloat16()
    old = model[2].weight.detach().clone()
    absorb_hardness(model, torch.ones(2, 3, dtype=torch.bfloat16))
    assert model[2].weight.dtype == torch.bfloat16
    assert torch.equal(model[2].weight, (old.double() * 3.0 / 1.5).bfloat16())


def test_a_weight_that_would_overflow_is_refused():
    model = harden(nn.Sequential(nn.Linear(3, 4), LambdaGELU(), nn.Linear(4, 3)), (20.0,)).half()
    nn.init.constant_(model[0].weight, 6000)
    said = r"0\.weight multiplied by up to 20 leaves the range of torch.float16"
    assert_as_it_was(model, torch.zeros(1, 3, dtype=torch.float16), said)


def test_there_must_be_a_lambda_gelu_and_layers_around_it():
    with pytest.raises(ValueError, match="has no λ-GELU activation"):
        absorb_hardness(nn.Sequential(nn.Linear(3, 3), nn.GELU()), torch.ones(1, 3))
    with pytest.raises(ValueError, match="a single λ-GELU with no layer"):
        absorb_hardness(LambdaGELU(), torch.ones(1, 3))


def test_training_mode_and_gradients_are_left():
    model = harden(nn.Sequential(nn.Linear(3, 4), LambdaGELU(), nn.Dropout(), nn.Linear(4, 2))).train()
    model[0].weight.requires_grad_(False)
    absorb_hardness(model, torch.ones(2, 3))
    assert all(module.training for module in model.modules())
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]


def test_config_says_gelu_unless_told_not_to():
    for rewrite, expected in ((True, "gelu"), (False, "lambda_gelu")):
        model = MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=2, num_labels=2))
        report = absorb_hardness(model, torch.ones(2, 3), rewrite_config=rewrite)
        assert model.config.hidden_act == expected
        assert [str(change) for change in report.config_changes] == ["hidden_act: 'lambda_gelu' → 'gelu'"] * rewrite


class HiddenUse(nn.Module):
    """Computes with the memory of its first weight once more, and says so nowhere."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), LambdaGELU(), nn.Linear(4, 4))
        self.hidden = [self.net[0].weight.detach()[1:]]

    def forward(self, x):
        return self.net(x) + (x @ self.hidden[0].T).sum(-1, keepdim=True)


def test_an_absorption_that_changes_the_function_is_taken_back():
    assert_as_it_was(
        harden(HiddenUse()), torch.randn(5, 3), "λ in its weights HiddenUse gives other outputs, and it is as"
    )


def test_an_absorption_whose_numbers_leave_float16_is_taken_back():
    model = nn.Sequential(nn.Linear(3, 4), LambdaGELU(), nn.Linear(4, 3)).half()
    nn.init.constant_(model[0].weight, 1000.0)
    assert_as_it_was(harden(model, (20.0,)), torch.full((1, 3), 3.0).half(), r"try model.float")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_deep_models_of_each_dtype_absorb_hardness_though_rounding_adds_up(dtype):
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), LambdaGELU())]
    model = harden(nn.Sequential(*layers, nn.Linear(64, 8)), (1.37, 3.3, 20.7)).to(dtype)
    assert len(absorb_hardness(model, torch.randn(16, 64, dtype=dtype))) == 12
