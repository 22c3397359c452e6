"""Exchanging the activations of a model that exists."""

import contextlib
import copy
from functools import partial

import pytest
import timm.layers
import torch
from families import BY_NAME
from tiny_training import lambda_gelus
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, BertForMaskedLM, MambaConfig, MambaForCausalLM, activations

from hf_lgelu import LambdaGELU, LambdaSiLU, replace_activations, substitute_relu
from hf_lgelu.activation.module import LambdaGELUTanh
from hf_lgelu.models.config_keys import UnsupportedConfigError, plan_config_changes
from hf_lgelu.models.surgery import TemporaryRelu, exchange_activations
from hf_lgelu.networks.sites import LEARNED_KINDS, find_sites
from hf_lgelu.networks.smooth_calls import find_smooth_calls

BERT = BY_NAME["bert"]


class Chain(nn.Module):
    """Linear layers with the given activations between them, at named places."""

    def __init__(self, *acts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(act, nn.Linear(8, 8)) for act in acts)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def snapshot(model):
    """Modules, tensors (by identity and value), modes and config of a model."""
    return (
        {name: id(module) for name, module in model.named_modules(remove_duplicate=False)},
        {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()},
        {name: module.training for name, module in model.named_modules()},
        model.config.to_dict() if hasattr(model, "config") else None,
    )


def assert_unchanged(model, before):
    modules, tensors, modes, config = snapshot(model)
    assert (modules, modes, config) == (before[0], before[2], before[3])
    assert tensors.keys() == before[1].keys()
    for name, (pointer, value) in tensors.items():
        assert pointer == before[1][name][0]
        assert torch.equal(value, before[1][name][1])


PLAIN = {LambdaGELU: F.gelu, LambdaGELUTanh: partial(F.gelu, approximate="tanh"), LambdaSiLU: F.silu}


def plain_form(gate: type, x: torch.Tensor, hardness: float) -> torch.Tensor:
    """x·G(λx), by torch's own form at λ = 1 in float64."""
    return (PLAIN[gate](hardness * x.double()) / hardness).to(x.dtype)


def named(name):
    return lambda: activations.ACT2FN[name]


SMOOTH = [
    ("gelu", nn.GELU, LambdaGELU),
    ("gelu", lambda: nn.GELU(approximate="tanh"), LambdaGELUTanh),
    *(("gelu", named(name), LambdaGELU) for name in ("gelu", "gelu_python")),
    *(
        ("gelu", named(name), LambdaGELUTanh)
        for name in ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh")
    ),
    # The sigmoid form is no row's λ = 1.
    *(("gelu", make, LambdaGELU) for make in (named("quick_gelu"), timm.layers.QuickGELU, timm.layers.GELU)),
    ("gelu", timm.layers.GELUTanh, LambdaGELUTanh),
    *(("silu", make, LambdaSiLU) for make in (nn.SiLU, named("silu"), named("swish"), timm.layers.Swish)),
    *(("mish", make, LambdaGELU) for make in (nn.Mish, named("mish"), timm.layers.Mish)),
]


@pytest.mark.parametrize(("kind", "make", "gate"), SMOOTH, ids=lambda value: value if isinstance(value, str) else "")
def test_every_form_is_replaced_under_its_kind_only_by_the_gate_that_it_is(kind, make, gate):
    x = torch.randn(3, 4)
    for kinds in (("gelu",), ("silu",), ("mish",)):
        model = Chain(make(), make())
        if kinds != (kind,):
            with pytest.raises(ValueError, match=rf"it has \w+ × 2 \(kinds=\('{kind}',\)"):
                replace_activations(model, kinds=kinds)
            continue
        replace_activations(model, kinds=kinds, init_hardness=1.5)
        assert [type(block[0]) for block in model.blocks] == [gate, gate]
        hidden = plain_form(gate, model.first(x), 1.5)
        expected = model.blocks[1][1](plain_form(gate, model.blocks[0][1](hidden), 1.5))
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-6)


def test_one_gelu_at_three_places_becomes_three_hardnesses():
    gelu = nn.GELU()
    model = nn.Sequential(nn.Linear(4, 8), gelu, nn.Linear(8, 8), gelu, nn.Linear(8, 2), gelu)
    assert len(replace_activations(model)) == 3
    assert len({id(module.raw_hardness) for module in (model[1], model[3], model[5])}) == 3
    assert sum("raw_hardness" in name for name, _ in model.named_parameters()) == 3
    model(torch.randn(2, 4)).sum().backward()
    assert all(module.raw_hardness.grad is not None for module in lambda_gelus(model))
    assert len(substitute_relu(model)) == 3
    assert [type(model[i]) for i in (1, 3, 5)] == [nn.ReLU] * 3


BAD = [
    ({"init_hardness": 1.0}, ValueError, "λ"),
    ({"temperature": 0.0}, ValueError, "temperature"),
    ({"kinds": "gelu"}, ValueError, "unknown activation kind 'g'"),
    ({"kinds": ()}, ValueError, "no activation module of kind"),
    ({"kinds": ("gelu", "swiglu")}, ValueError, "swiglu"),
    ({"kinds": ("mish",)}, ValueError, "it has GELU × 2"),
    ({"include": lambda name: False}, ValueError, "`include` accepts"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD, ids=range(len(BAD)))
def test_bad_arguments_leave_the_model_as_it_was(arguments, error, message):
    model = Chain(nn.GELU(), nn.GELU(approximate="tanh")).train()
    model.blocks[1].eval()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        replace_activations(model, **arguments)
    assert_unchanged(model, before)


@pytest.mark.parametrize("operate", [replace_activations, substitute_relu])
def test_nothing_found_leaves_the_model_as_it_was(operate):
    model = BERT.build("relu")
    before = snapshot(model)
    with pytest.raises(ValueError, match="find_smooth_calls"):
        operate(model)
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (nn.GELU, r"GELU × 1 \(kinds=\('gelu',\)\)\. convert_to_relu\("),
        (nn.ReLU, "it has no smooth gates"),
        (nn.Tanh, r"Tanh × 1 \(kinds=\('tanh',\)\)\. convert_to_relu\("),
        (nn.Hardtanh, "it has no smooth gates"),
    ],
)
def test_nothing_to_substitute_says_what_there_is(make, told):
    with pytest.raises(ValueError, match=told):
        substitute_relu(Chain(make()))


def test_a_plan_that_fails_in_a_second_model_leaves_the_first_as_it_was():
    both = nn.ModuleDict({"bert": BERT.build(), "mpt": BY_NAME["mpt"].build()})
    before = [snapshot(model) for model in both.values()]
    sites = find_sites(both, ("gelu",))

    def plan(root, names):  # MPT has no key
        return plan_config_changes(root, set(names), "relu")

    with pytest.raises(UnsupportedConfigError, match="MptConfig"):
        exchange_activations(both, sites, [nn.ReLU() for _ in sites], plan)
    for model, state in zip(both.values(), before, strict=True):
        assert_unchanged(model, state)
    both["mpt"] = BY_NAME["gpt2"].build()
    substitute_relu(both, kinds=("gelu",))
    assert both["bert"].config.hidden_act == both["mpt"].config.activation_function == "relu"


def largest_change(gate: nn.Module) -> float:
    """By which ReLU in its place moves one unit most, looked for point by point."""
    points = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
    return (gate.double()(points) - points.relu()).abs().max().item()


def test_soft_gates_that_become_relu_are_told(caplog):
    model = Chain(LambdaGELU(init_hardness=150.0), LambdaSiLU(init_hardness=1.5), nn.GELU())
    change = largest_change(copy.deepcopy(model.blocks[1][0]))

    report = substitute_relu(model, kinds=("gelu", *LEARNED_KINDS))

    assert [(name, gate.hardness) for name, gate in report.gates.items()] == [
        ("blocks.0.0", pytest.approx(150.0)), ("blocks.1.0", pytest.approx(1.5)),
    ]  # fmt: skip
    assert report.gates["blocks.1.0"].swap_error == pytest.approx(change, rel=1e-5)
    assert f"softest gate blocks.1.0: λ = 1.5, at most {change:.3g} a unit" in str(report)
    assert "1 of the 3 gates that became ReLU were soft" in caplog.text
    assert f"(blocks.1.0: λ = 1.5, at most {change:.3g} a unit; hardening leaves 0.00213)" in caplog.text


def test_a_config_that_another_model_shares_is_not_touched():
    config = BERT.build().config
    one, other = BertForMaskedLM(config), BertForMaskedLM(config)
    replace_activations(one)
    assert one.config.hidden_act == "lambda_gelu"
    assert one.bert.config is one.config
    assert other.config is config
    assert config.hidden_act == "gelu"
    substitute_relu(one)
    assert (one.config.hidden_act, config.hidden_act) == ("relu", "gelu")


def test_generation_and_attention_settings_survive():
    config = BY_NAME["gpt2"].build().config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    replace_activations(model)
    assert model.config._attn_implementation == "eager"
    assert model.generate(**BY_NAME["gpt2"].inputs(), max_new_tokens=2, do_sample=False).shape == (2, 8)
    model.set_attn_implementation("sdpa")
    held = [module.config for module in model.modules() if hasattr(module, "config")]
    assert len(held) > 3
    assert {held_config._attn_implementation for held_config in held} == {"sdpa"}


def test_torchs_encoder_layer_computes_what_its_sites_hold():
    # In eval mode it runs a fused GELU or ReLU kernel that never looks at the module.
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=nn.GELU(), batch_first=True).eval()
    x = torch.randn(2, 3, 8)

    def reference(activation):
        hidden = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
        return layer.norm2(hidden + layer.linear2(activation(layer.linear1(hidden))))

    def close(activation):
        with torch.no_grad():
            return torch.allclose(layer(x), reference(activation), rtol=0, atol=1e-5)

    assert close(F.gelu)
    replace_activations(layer, init_hardness=8.0)
    assert close(lambda z: plain_form(LambdaGELU, z, 8.0))
    assert not close(F.gelu)
    with TemporaryRelu(layer).applied():
        assert close(F.relu)
    assert close(lambda z: plain_form(LambdaGELU, z, 8.0))
    substitute_relu(layer)
    assert close(F.relu)


def test_hardness_is_made_where_the_neighbours_live():
    with torch.device("meta"):
        model = Chain(nn.GELU(), nn.GELU())
    model.first = nn.Linear(4, 8)
    model.blocks[1] = nn.Sequential(nn.GELU(), nn.Linear(8, 8))
    replace_activations(model)
    assert [block[0].raw_hardness.device.type for block in model.blocks] == ["meta", "cpu"]


class Reuse(nn.Module):
    """Uses what an activation has got after it has worked on it in place."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.harmless, self.act = nn.SiLU(inplace=True), act

    def forward(self, x):
        hidden = self.second(self.harmless(self.first(x)))
        gated = self.act(hidden)
        return self.third(gated) + self.third(hidden)


IN_PLACE = [partial(nn.SiLU, inplace=True), partial(nn.Mish, inplace=True), partial(timm.layers.Swish, inplace=True)]


@pytest.mark.parametrize("make", IN_PLACE)
def test_relu_works_in_place_where_the_activation_did(make):
    model, x = Reuse(make()), torch.randn(16, 4)
    hidden = model.second(F.relu(model.first(x))).relu()
    expected = 2 * model.third(hidden)
    with TemporaryRelu(model, kinds=("silu", "mish")).applied():
        torch.testing.assert_close(model(x), expected)
    substitute_relu(model, kinds=("silu", "mish"))
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()


def test_torchs_encoder_with_padding_gives_its_gates_plain_tensors():
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation=nn.GELU(), batch_first=True)
    encoder, rows = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [2]])
    replace_activations(encoder)
    with torch.no_grad():
        found = encoder(rows, src_key_padding_mask=padding)
        for number, length in enumerate((5, 3, 2)):  # a row without padding gives the same
            alone = encoder(rows[number : number + 1, :length])
            torch.testing.assert_close(found[number, :length], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_inside_is_relu_and_outside_is_what_was_there(training):
    model = BERT.build("lambda_gelu").train(training)
    before = snapshot(model)
    gates = [name for name, module in model.named_modules() if isinstance(module, LambdaGELU)]
    with contextlib.suppress(KeyboardInterrupt), TemporaryRelu(model).applied():
        assert [type(model.get_submodule(name)) for name in gates] == [nn.ReLU] * 3
        assert model.get_submodule(gates[0]).training is training
        assert find_smooth_calls(model, BERT.inputs()) == []
        raise KeyboardInterrupt
    assert_unchanged(model, before)
    assert len(find_smooth_calls(model, BERT.inputs())) == 3


def test_nested_blocks_each_give_back_what_they_took():
    model = nn.Sequential(LambdaGELU(), nn.GELU(), nn.SiLU())
    original = list(model)
    with TemporaryRelu(model).applied():
        outer = list(model)
        assert [type(m) for m in outer] == [nn.ReLU, nn.GELU, nn.SiLU]
        with TemporaryRelu(model, kinds=("gelu", "silu")).applied():
            assert [type(m) for m in model] == [nn.ReLU] * 3
        assert all(now is then for now, then in zip(model, outer, strict=True))
    assert all(now is then for now, then in zip(model, original, strict=True))


def test_gates_that_each_forward_makes_anew_are_refused():
    """Mamba's convolution makes its activation by the name, whatever module stands at `act`."""
    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, hidden_act="lambda_silu")
    model = MambaForCausalLM(config).eval()
    before = model(torch.arange(9)[None]).logits
    with pytest.raises(ValueError, match=r"MambaForCausalLM makes λ-gates anew .* backbone\.layers\.0\.mixer\.act"):
        substitute_relu(model)
    assert type(model.backbone.layers[0].mixer.act) is LambdaSiLU
    assert torch.equal(model(torch.arange(9)[None]).logits, before)
