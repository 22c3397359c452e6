"""export_gelu: the folder, what loads it elsewhere, what is measured, and what is refused."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from scipy.special import ndtr
from torch import nn

from hf_lgelu import LambdaGELU, MLPConfig, MLPForClassification, replace_activations
from hf_lgelu.export.plain import export_gelu, maps_around
from hf_lgelu.models.config_keys import ConfigChange, UnsupportedConfigError

GPT2 = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TOKENS = {"input_ids": torch.arange(12).reshape(2, 6) * 7 % 29 + 3}
IMAGES = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))}


def timm(architecture, sizes):
    return {"architecture": architecture, "model_args": {**sizes, "act_layer": "lambda_gelu"}, "num_labels": 3}


@torch.no_grad()
def trained(model):
    """Another λ at every site, and weights large enough for a gate's shape to matter."""
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.5 / parameter[0].numel() ** 0.5)
        elif not parameter_name.endswith("raw_hardness"):
            parameter.uniform_(0.5, 1.5)
    for index, module in enumerate(m for m in model.modules() if isinstance(m, LambdaGELU)):
        module.hardness_override.fill_((1.5, 3.0, 20.0)[index % 3])
    return model.eval()


@torch.no_grad()
def logits_of(model, inputs):
    return model(**inputs).logits


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    config = MLPConfig(num_features=6, hidden_size=8, num_hidden_layers=3, num_labels=4)
    return trained(MLPForClassification(config))


FEATURES = {"features": torch.randn(50, 6, generator=torch.Generator().manual_seed(3))}


def test_the_mlp_by_hand(mlp, tmp_path):
    export = export_gelu(mlp, tmp_path / "gelu", inputs=FEATURES)
    weights = {n: t.double().numpy() for n, t in load_file(tmp_path / "gelu" / "model.safetensors").items()}
    hidden = FEATURES["features"].double().numpy()
    for layer in range(3):
        hidden = hidden @ weights[f"layers.{layer}.linear.weight"].T + weights[f"layers.{layer}.linear.bias"]
        hidden = hidden * ndtr(hidden)
    by_hand = torch.from_numpy(hidden @ weights["classifier.weight"].T + weights["classifier.bias"])
    expected = logits_of(mlp.double(), {"features": FEATURES["features"].double()})
    assert (by_hand - expected).abs().max() < 2e-6 * expected.abs().max()
    assert export.config_changes == (ConfigChange(("hidden_act",), "lambda_gelu", "gelu"),)
    assert "config hidden_act: 'lambda_gelu' → 'gelu'" in str(export)


def test_weights_keep_their_dtype(mlp, tmp_path):
    half = mlp.to(torch.bfloat16)
    export = export_gelu(half, tmp_path / "gelu", inputs=FEATURES)
    assert {t.dtype for t in load_file(tmp_path / "gelu" / "model.safetensors").values()} == {torch.bfloat16}
    assert 1e-4 < export.change.largest_change / export.change.largest_output < 2e-2  # λ = 1.5 and 3 round anew


def gpt2():
    config = transformers.GPT2Config(**GPT2, **SPECIAL, activation_function="lambda_gelu")
    return transformers.GPT2LMHeadModel(config)


def convnext():
    sizes = {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16]}
    return transformers.TimmWrapperForImageClassification(
        transformers.TimmWrapperConfig(**timm("convnext_tiny", sizes))
    )


@pytest.mark.parametrize(
    ("make", "inputs", "said"),
    [(gpt2, TOKENS, '"activation_function": "gelu"'), (convnext, IMAGES, '"act_layer": "gelu"')],
)
def test_the_gelu_model_computes_the_same_and_nothing_of_lambda_gelu_is_left(make, inputs, said, tmp_path):
    """So plain transformers, where nobody imports this package, loads it: the config says all."""
    torch.manual_seed(0)
    model = trained(make())
    export = export_gelu(model, tmp_path / "gelu", inputs=inputs)
    loaded = type(model).from_pretrained(tmp_path / "gelu").eval()
    smooth, found = logits_of(model, inputs), logits_of(loaded, inputs)
    largest, change = smooth.abs().max().item(), (found - smooth).abs().max().item()
    assert change <= 1e-5 * largest
    assert export.change.largest_output == pytest.approx(largest)
    assert export.change.largest_change == pytest.approx(change, rel=0.5, abs=1e-6 * largest)
    text = (tmp_path / "gelu" / "config.json").read_text()
    assert said in text
    assert "lambda_gelu" not in text
    assert {path.suffix for path in (tmp_path / "gelu").iterdir()} <= {".json", ".safetensors", ".md"}
    weights = load_file(tmp_path / "gelu" / "model.safetensors")
    assert not any("hardness" in key or "temperature" in key for key in weights)
    assert [gate.hardness for gate in export.gates.values()] == [1.5, 3.0, 20.0, 1.5][: len(export.gates)]


def resnet():
    config = transformers.TimmWrapperConfig(**timm("resnet18", {"layers": [1] * 4, "channels": [8, 8, 16, 16]}))
    return transformers.TimmWrapperForImageClassification(config)


def gpt():
    model = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**GPT2))  # its "gelu" is the tanh form
    replace_activations(model, gate="lambda_gelu")
    return model


def adapted():
    return get_peft_model(
        MLPForClassification(MLPConfig(num_features=6)), LoraConfig(target_modules=["layers.0.linear"])
    )


def of_two_kinds():
    model = MLPForClassification(MLPConfig(num_features=6, num_hidden_layers=2, hidden_act="gelu"))
    replace_activations(model, gate="lambda_silu", include=lambda name: ".0." in name)
    replace_activations(model)
    return model


REFUSED = [
    (of_two_kinds, FEATURES, ValueError, "gates of one kind, got lambda_silu, lambda_gelu"),
    (resnet, IMAGES, ValueError, "export_relu"),
    (gpt, TOKENS, UnsupportedConfigError, "OpenAIGPTConfig"),
    (adapted, FEATURES, RuntimeError, "merge_and_unload"),
    (
        lambda: nn.Sequential(nn.Linear(3, 4), LambdaGELU()),
        torch.ones(1, 3),
        TypeError,
        "Sequential.*substitute_relu",
    ),
    (
        lambda: MLPForClassification(MLPConfig(num_features=6, hidden_act="gelu")),
        FEATURES,
        ValueError,
        "has no λ-GELU",
    ),
]


@pytest.mark.parametrize(("make", "inputs", "error", "told"), REFUSED)
def test_what_is_refused_leaves_nothing(make, inputs, error, told, tmp_path):
    with pytest.raises(error, match=told):
        export_gelu(make(), tmp_path / "gelu", inputs=inputs)
    assert list(tmp_path.iterdir()) == []


class Block(nn.Module):
    """Two maps around a gate, and what may read their values besides."""

    def __init__(self, way):
        super().__init__()
        self.up, self.gate, self.down, self.way = (
            nn.Linear(4, 4),
            LambdaGELU(init_hardness=1.00001),
            nn.Linear(4, 4),
            way,
        )
        self.other = nn.Linear(4, 4)

    def forward(self, x):
        return self.way(self, x)


def read(block, x, *, late=lambda block, z, y: 0.0):
    z = block.up(x)
    y = block.gate(z)
    return block.down(y) + 1e-9 * late(block, z, y)


ALONE = {
    "a copy between": lambda b, x: b.down(b.gate(b.up(x).contiguous())),
    "dropout in evaluation": lambda b, x: b.down(nn.functional.dropout(b.gate(b.up(x)), training=b.training)),
    "moved": lambda b, x: b.down(b.gate(b.up(x).view(-1)).view(-1, 4)[None].flatten(0, 1)),
}
NOT_ALONE = {  # at this λ no output shows it
    "twice": lambda b, x: read(b, x) + read(b, x + 1),
    "a sum before": lambda b, x: b.down(b.gate(b.up(x) + 1e-9)),
    "the map before is read": lambda b, x: read(b, x, late=lambda b, z, y: z),
    "... by a map": lambda b, x: read(b, x, late=lambda b, z, y: b.other(z)),
    "the gate is read": lambda b, x: read(b, x, late=lambda b, z, y: y),
    "... by a map, twice": lambda b, x: read(b, x, late=lambda b, z, y: b.other(y)),
    "the map after reads more": lambda b, x: read(b, x, late=lambda b, z, y: b.down(x)),
    "the map before makes more": lambda b, x: read(b, x, late=lambda b, z, y: b.up(y)),
    "a product": lambda b, x: b.down(b.gate(b.up(x)) * b.other(x)),
    "the weight before is read": lambda b, x: read(b, x, late=lambda b, z, y: nn.functional.linear(x, b.up.weight)),
    "the weight after is read": lambda b, x: read(b, x, late=lambda b, z, y: nn.functional.linear(x, b.down.weight)),
    "the output": lambda b, x: (read(b, x), b.gate(b.up(x))),
    "not run": lambda b, x: b.down(x),
}


def around(way):
    torch.manual_seed(0)
    block = Block(way).eval()
    with torch.no_grad():
        return block, maps_around(block, torch.randn(3, 4))


@pytest.mark.parametrize("name", ALONE)
def test_maps_around_a_gate_that_stands_alone(name):
    _, found = around(ALONE[name])
    names = ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert [name for around in found for map in around for name in map.parameters] == names


@pytest.mark.parametrize("name", NOT_ALONE)
def test_whatever_else_reads_a_value_is_a_refusal(name):
    with pytest.raises(ValueError, match=r"1 of its gates .*\n  gate: "):
        around(NOT_ALONE[name])


def test_tied_weights_are_refused():
    block = Block(read)
    block.other.weight = block.down.weight
    with pytest.raises(ValueError, match="weights of its own"):
        maps_around(block, torch.randn(3, 4))


def test_a_half_precision_network_that_casts_nothing_is_exported(tmp_path):
    """ConvNeXt's convolutions take their own dtype alone."""
    sizes = {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "image_size": 32, "hidden_act": "lambda_gelu"}
    torch.manual_seed(0)
    model = transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**sizes)).bfloat16()
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    export = export_gelu(model, tmp_path / "given", inputs=images)
    assert export.change.largest_change < 0.02 * export.change.largest_output
    assert export.change.rows == 3
