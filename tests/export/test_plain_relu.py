"""export_relu on the MLP, GPT-2 and a TimmWrapper; every family is exported in tests/families/test_families.py."""

import json

import pytest
import small_networks as networks
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from word_tokenizer import word_tokenizer

from hf_lgelu import LambdaGELU, anneal_hardness, export_gelu, initialize_hardness, replace_activations
from hf_lgelu.export.plain import export_relu
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.networks.sites import find_sites

KAPPA = 0.16997120747990369  # max u·(1 − Φ(u)), from mpmath


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return MLPForClassification(MLPConfig(num_features=6, hidden_size=8, num_hidden_layers=3))


def by_hand(folder, features):
    """The ReLU MLP of a folder, from its tensors alone, in float64."""
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    hidden = features.double()
    for layer in range(3):
        hidden = (hidden @ weights[f"layers.{layer}.linear.weight"].T + weights[f"layers.{layer}.linear.bias"]).clamp(0)
    return hidden @ weights["classifier.weight"].T + weights["classifier.bias"]


def test_folder_holds_the_relu_network_and_nothing_else(mlp, tmp_path):
    anneal_hardness(mlp, 1.0)
    before = {name: tensor.clone() for name, tensor in mlp.state_dict().items()}
    features = torch.randn(50, 6)
    export = export_relu(mlp, tmp_path / "relu", inputs={"features": features})
    files = {"config.json", "model.safetensors", "README.md"}
    assert {path.name for path in (tmp_path / "relu").iterdir()} == files
    assert [path.name for path in tmp_path.iterdir()] == ["relu"]
    saved = load_file(tmp_path / "relu" / "model.safetensors")
    assert set(saved) == {name for name in before if "activation" not in name}
    assert json.loads((tmp_path / "relu" / "config.json").read_text())["hidden_act"] == "relu"
    assert "lambda_gelu" not in (tmp_path / "relu" / "config.json").read_text()

    expected = by_hand(tmp_path / "relu", features)
    loaded = MLPForClassification.from_pretrained(tmp_path / "relu")
    torch.testing.assert_close(loaded(features=features).logits.double(), expected, rtol=1e-5, atol=1e-6)
    # the model given is the one it was
    assert all(torch.equal(tensor, before[name]) for name, tensor in mlp.state_dict().items())
    assert [site.kind for site in find_sites(mlp)] == ["lambda_gelu"] * 3
    assert mlp.config.hidden_act == "lambda_gelu"
    assert mlp.training

    change = (mlp.eval()(features=features).logits.double() - expected).abs().max().item()
    assert 0 < change == pytest.approx(export.change.largest_change, rel=1e-2)
    assert export.change.rows == 50
    assert export.change.largest_output == pytest.approx(expected.abs().max().item(), rel=1e-2)
    bounds = {name: gate.swap_error for name, gate in export.gates.items()}
    assert bounds == pytest.approx({f"layers.{i}.activation": KAPPA / 159.576912 for i in range(3)})
    assert export.smooth_calls == ()
    assert "3 λ-gates → relu" in str(export)
    assert "hidden_act: 'lambda_gelu' → 'relu'" in str(export)


def test_the_softest_gate_is_the_one_whose_swap_changes_most(tmp_path):
    model = MLPForClassification(MLPConfig(num_features=6, hidden_size=8, num_hidden_layers=3, hidden_act="gelu"))
    replace_activations(model, gate="lambda_silu", include=lambda name: ".1." in name)
    replace_activations(model)
    for layer, value in zip(model.layers, (5.0, 4.0, 3.0), strict=True):
        layer.activation.hardness_override.fill_(value)
    said = str(export_relu(model, tmp_path / "relu", inputs=torch.randn(4, 6), allow_soft=True))
    assert "softest gate layers.1.activation: λ = 4, at most 0.0696 a unit" in said  # 0.27846 / 4 > 0.16997 / 3


def test_soft_gates_are_refused_with_their_numbers(mlp, tmp_path):
    initialize_hardness(mlp, "increasing", 1.5, 200.0)
    with pytest.raises(ValueError, match=r"^1 of 3 gates") as refusal:
        export_relu(mlp, tmp_path / "relu")
    message = str(refusal.value)
    assert "layers.0.activation: λ = 1.5, κ/λ = 0.113" in message
    assert "layers.1.activation" not in message
    assert "On random inputs: largest change" in message
    assert "`allow_soft`" in message
    assert list(tmp_path.iterdir()) == []
    export = export_relu(mlp, tmp_path / "relu", allow_soft=True)
    assert "\n  on random inputs: largest change" in str(export)
    assert export.gates["layers.0.activation"].hardness == pytest.approx(1.5)
    assert (tmp_path / "relu" / "config.json").exists()


def test_programs_that_ignore_the_activation_are_named(mlp, tmp_path):
    anneal_hardness(mlp, 1.0)
    assert export_relu(mlp, tmp_path / "mlp").warnings == ()
    gpt2 = networks.gpt2(n_layer=1, activation_function="lambda_gelu")
    for export in (export_relu(gpt2, tmp_path / "relu", allow_soft=True), export_gelu(gpt2, tmp_path / "gelu")):
        assert "\n  warning: in llama.cpp, a gpt2 has its family's own activation" in str(export)


def test_the_tokenizer_of_the_source_goes_along(mlp, tmp_path):
    anneal_hardness(mlp, 1.0)
    word_tokenizer(["w1", "w2"], 16).save_pretrained(tmp_path / "source")
    export_relu(mlp, tmp_path / "relu", source=tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "relu" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


@pytest.mark.parametrize("export", [export_relu, export_gelu])
def test_a_folder_with_something_in_it_is_kept_and_bfloat16_stays(mlp, tmp_path, export):
    options = {"inputs": torch.ones(2, 6)} | ({"allow_soft": True} if export is export_relu else {})
    mlp.to(torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(FileExistsError, match="is not empty"):
        export(mlp, tmp_path, **options)
    assert "lambda_gelu" in (tmp_path / "config.json").read_text()
    export(mlp, tmp_path, **options, overwrite=True)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("part", ["weight", "forward"])
def test_nothing_stays_behind_when_the_reloaded_model_differs(mlp, tmp_path, monkeypatch, part):
    anneal_hardness(mlp, 1.0)
    (tmp_path / "relu").mkdir()
    load = MLPForClassification.from_pretrained

    def load_another(*args, **kwargs):
        model = load(*args, **kwargs)
        if part == "weight":
            model.layers[1].linear.weight.data[2, 3] += 1e-7
        else:
            model.layers[1].activation = torch.nn.LeakyReLU(1e-3)
        return model

    monkeypatch.setattr(MLPForClassification, "from_pretrained", load_another)
    said = {"weight": r"has another layers\.1\.linear\.weight", "forward": "gives other outputs"}[part]
    with pytest.raises(RuntimeError, match=f"loaded again, {said}"):
        export_relu(mlp, tmp_path / "relu")
    assert [path.name for path in tmp_path.iterdir()] == ["relu"]
    assert list((tmp_path / "relu").iterdir()) == []


def with_act(act):
    return MLPForClassification(MLPConfig(num_features=6, hidden_size=8, num_hidden_layers=3, hidden_act=act))


def adapted():
    return get_peft_model(with_act("lambda_gelu"), LoraConfig(target_modules=["layers.0.linear"]))


NAN, NONE = {"features": torch.full((2, 6), float("nan"))}, {"features": torch.ones(0, 6)}
REFUSED = [
    (lambda: with_act("gelu"), {}, ValueError, r"gelu.*convert_to_relu\("),
    (lambda: with_act("relu"), {}, ValueError, "no smooth gate"),
    (lambda: torch.nn.Sequential(LambdaGELU()), {}, TypeError, r"Sequential.*substitute_relu\("),
    (adapted, {}, RuntimeError, "merge_and_unload"),
    (lambda: with_act("lambda_gelu"), {"max_swap_error": float("nan")}, ValueError, "too soft"),
    (lambda: with_act("lambda_gelu"), {"inputs": NAN, "allow_soft": True}, ValueError, "gives NaN"),
    (lambda: with_act("lambda_gelu"), {"inputs": NONE, "allow_soft": True}, ValueError, "are empty"),
]


@pytest.mark.parametrize(("make", "options", "error", "told"), REFUSED)
def test_what_is_refused_leaves_nothing(make, options, error, told, tmp_path):
    with pytest.raises(error, match=told):
        export_relu(make(), tmp_path / "relu", **options)
    assert list(tmp_path.iterdir()) == []
