"""Exports read where hf_lgelu cannot be imported: GELU and ReLU checkpoints, a tokenizer, the MLP."""

import json
from pathlib import Path

import pytest
import small_networks as networks
import torch
from fresh_process import run_fresh
from gelu_models import MODELS, build, logits_of
from safetensors.torch import load_file
from word_tokenizer import word_tokenizer

from hf_lgelu import MLPConfig, MLPForClassification, anneal_hardness, export_gelu, export_relu
from hf_lgelu.export.card import CheckpointFacts, loading_code

HERE = Path(__file__).parent
FEATURES = torch.randn(20, 5, generator=torch.Generator().manual_seed(4))
IDS = torch.randint(30, (3, 9), generator=torch.Generator().manual_seed(5))


def gelu_checkpoint(name, folder):
    model, record = build(name), MODELS[name]
    export = export_gelu(model, folder, inputs=record.inputs)
    torch.save({"auto": record.auto or f"AutoModel{record.head}", "inputs": record.inputs}, folder / "inputs.pt")
    return export, logits_of(model, record.inputs)


def relu_checkpoint(folder):
    """A GPT-2 with its tokenizer."""
    torch.manual_seed(0)
    model = networks.gpt2(vocab_size=30, activation_function="lambda_gelu")
    anneal_hardness(model, 1.0)
    tokenizer = word_tokenizer([f"w{number}" for number in range(1, 30)], 16)
    export = export_relu(model, folder, inputs={"input_ids": IDS})
    tokenizer.save_pretrained(folder)
    example = {"auto": "AutoModelForCausalLM", "inputs": {"input_ids": IDS}, "text": "w3 w4"}
    torch.save(example, folder / "inputs.pt")
    return export, model


def mlp_with_the_code_of_its_card(folder):
    torch.manual_seed(0)
    config = MLPConfig(num_features=5, hidden_size=16, num_hidden_layers=3, num_labels=4, hidden_act="relu")
    MLPForClassification(config).save_pretrained(folder)
    code = loading_code(CheckpointFacts("MLPForClassification", layers=3), str(folder), "relu")["plain_code"]
    torch.save({"code": code, "inputs": {"features": FEATURES}}, folder / "inputs.pt")
    return {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}


# their configs say it as those of gpt2 and timm-convnext do
SLOW = ("bert", "vit")
every_model = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS]
)


@pytest.fixture(scope="module")
def elsewhere(request, tmp_path_factory):
    """({name: what is known of it here}, {name: what it computes where hf_lgelu cannot be imported}, folder)."""
    root = tmp_path_factory.mktemp("elsewhere")
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    here = {name: gelu_checkpoint(name, root / name) for name in MODELS if name in asked or name not in SLOW}
    here |= {"relu": relu_checkpoint(root / "relu"), "mlp": mlp_with_the_code_of_its_card(root / "mlp")}
    reader = run_fresh(HERE / "elsewhere_reader.py", root)
    assert reader.returncode == 0, reader.stderr[-3000:]
    return here, torch.load(root / "read.pt", weights_only=True), root


@every_model
def test_the_gelu_model_computes_the_same_in_a_process_without_hf_lgelu(name, elsewhere):
    (export, smooth), found = elsewhere[0][name], elsewhere[1][name]["model"]
    largest = smooth.abs().max().item()
    change = (found - smooth).abs().max().item()
    assert change <= 1e-5 * largest
    assert export.change.largest_output == pytest.approx(largest)
    assert export.change.largest_change == pytest.approx(change, rel=0.5, abs=1e-6 * largest)


@every_model
def test_the_config_says_gelu_and_nothing_of_lambda_gelu_is_left(name, elsewhere):
    export, folder = elsewhere[0][name][0], elsewhere[2] / name
    text = (folder / "config.json").read_text()
    saved = json.loads(text)
    for key, value in MODELS[name].changes.items():
        node = saved
        for step in key.split("."):
            node = node[step]
        assert node == value
    assert "lambda_gelu" not in text
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".pt", ".md"}
    assert not any("hardness" in key or "temperature" in key for key in load_file(folder / "model.safetensors"))
    assert [*export.hardness.values()] == [1.5, 3.0, 20.0, 1.5][: MODELS[name].sites]


def test_gpt2_with_its_tokenizer(elsewhere, tmp_path):
    (export, model), found = elsewhere[0]["relu"], elsewhere[1]["relu"]
    smooth = model.eval()(IDS).logits.detach()
    assert 0 < (found["model"] - smooth).abs().max() == pytest.approx(export.change.largest_change, rel=0.02)
    assert export.change.rows == 27
    assert found["tokens"] == [3, 4]
    # the same folder again, its tokenizer copied from where the first one lies
    source = elsewhere[2] / "relu"
    export_relu(model, tmp_path / "again", source=source)
    assert (tmp_path / "again/tokenizer_config.json").exists()
    assert (tmp_path / "again/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_an_mlp_by_the_code_on_its_card(elsewhere):
    weights, found = elsewhere[0]["mlp"], elsewhere[1]["mlp"]["model"]
    hidden = FEATURES.double()
    for layer in range(3):
        hidden = (hidden @ weights[f"layers.{layer}.linear.weight"].T + weights[f"layers.{layer}.linear.bias"]).clamp(0)
    by_hand = hidden @ weights["classifier.weight"].T + weights["classifier.bias"]
    torch.testing.assert_close(found.double(), by_hand, rtol=1e-5, atol=1e-6)
