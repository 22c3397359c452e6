"""Model cards: a whole one against expected_card.md, and what each says of its network."""

import tomllib
from pathlib import Path

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard

from hf_lgelu import MLPConfig, MLPForClassification, anneal_hardness, export_gelu, export_relu
from hf_lgelu.comparing.distance import Distance
from hf_lgelu.export.card import TEMPLATE, render_card, write_card
from hf_lgelu.files import is_hub_id
from hf_lgelu.models.checkpoint import CheckpointFacts, facts_of_folder
from hf_lgelu.models.hardening import GateHardness

ROOT = Path(__file__).parents[2]
MLP = CheckpointFacts("MLPForClassification")
CHANGE = Distance(
    output="logits", rows=64, kl=0.0, agreement=1.0, largest_change=0.00123, largest_output=4.5, relative_error=0.0
)

HARDNESS = {"layers.0.activation": 159.57691, "layers.1.activation": 80.0}


def card_of(checkpoint=MLP, *, hardness=HARDNESS, gate="lambda_gelu", **words):
    given = {"name": "letters", "activation": "relu", "change": CHANGE, "license": "mit"} | words
    gates = {site: GateHardness(gate, value, value) for site, value in hardness.items()}
    return ModelCard(str(render_card(checkpoint, gates, **given)))  # read again, as the Hub reads it


def test_whole_card():
    card = card_of(
        repo_id="someone/letters-relu", top="| network |\n| --- |\n| original |",
        smooth_calls=["head.act (Tanh): tanh × 1"],
    )  # fmt: skip
    expected = (Path(__file__).parent / "expected_card.md").read_text(encoding="utf-8")
    assert f"{card}\n" == expected


@pytest.mark.parametrize("activation", ["relu", "gelu", None])
def test_header_survives_huggingface_hub(activation):
    results = [EvalResult("other", "a/b", "a/b", "accuracy", 0.8565, dataset_split="test")]
    header = {"eval_results": results, "metrics": ["accuracy"], "datasets": ["a/b"], "base_model": "c/d"}
    data = card_of(activation=activation, repo_id="someone/letters", header=header).data
    assert (data.license, data.base_model, data.datasets) == ("mit", "c/d", ["a/b"])
    assert data.pipeline_tag == "tabular-classification"
    (result,) = data.eval_results
    assert (result.metric_value, result.metric_type, result.dataset_split) == (0.8565, "accuracy", "test")
    assert data.model_name == "letters"
    assert ("relu" in data.tags) == (activation == "relu")


@pytest.mark.parametrize(
    ("gate", "kappa", "formula", "activation"),
    [
        ("lambda_gelu", 0.16997, "x·Φ(λx)", "gelu"),
        ("lambda_gelu_tanh", 0.16997, "tanh(", "gelu_pytorch_tanh"),
        ("lambda_silu", 0.27846, "x·σ(λx)", "silu"),
    ],
)
def test_the_card_speaks_of_the_gate_that_the_network_has(gate, kappa, formula, activation):
    """κ by hand: the largest u·(1 − G(u)) on a fine grid."""
    u = torch.linspace(0, 8, 800_001, dtype=torch.float64)
    step = {
        "lambda_gelu": torch.special.ndtr(u),
        "lambda_gelu_tanh": 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (u + 0.044715 * u**3))),
        "lambda_silu": torch.sigmoid(u),
    }[gate]
    exact = (u * (1 - step)).max().item()
    assert exact == pytest.approx(kappa, abs=2e-4)
    text = card_of(activation=activation, gate=gate, hardness={"act": 100.0}).text
    assert f"κ = {exact:.5f}." in text
    assert f"| `act` | 100 | {exact / 100:.2g} |" in text
    assert formula in text
    assert ("λ-GELU" in text.partition("## Citation")[0]) == (gate != "lambda_silu")
    with pytest.raises(ValueError, match="'lambda_mish'"):
        card_of(gate="lambda_mish")


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("MLPForClassification", "tabular-classification"),
        ("SentenceTransformer", "sentence-similarity"),
        ("GPT2LMHeadModel", "text-generation"),
        ("BlipTextLMHeadModel", None),  # in no table of transformers
        ("TimmWrapperForImageClassification", "image-classification"),
        ("BertForMaskedLM", "fill-mask"),
        ("BertForTokenClassification", "token-classification"),
        ("Wav2Vec2ForCTC", "automatic-speech-recognition"),
        ("Wav2Vec2ForSequenceClassification", "audio-classification"),
        ("WhisperForConditionalGeneration", "automatic-speech-recognition"),
        ("T5ForConditionalGeneration", "text2text-generation"),
        ("BartForConditionalGeneration", "text2text-generation"),
        ("DetrForObjectDetection", "object-detection"),
        ("BertModel", None),
    ],
)
def test_the_task_is_what_the_class_does(name, task):
    assert CheckpointFacts(name).task == task


def test_what_the_hub_could_not_have_or_is_named_like_a_file_is_no_id():
    assert all(map(is_hub_id, ("gpt2", "bob/gpt2", "bob_1/gpt-2.0")))
    assert not any(map(is_hub_id, (None, "", "rows.csv", "data/rows.csv", "bob/gpt--2", "bob/gpt2.git", "bob/größe",
                                   "~bob/gpt2", "a/b/c", "bob/" + "a" * 97)))  # fmt: skip


def test_a_repository_is_named_as_the_hub_names_it():
    with pytest.raises(ValueError, match="Repo id"):
        card_of(repo_id='x")\nimport os  # ')


def test_texts_of_others_are_text_on_the_card():
    hostile = "x\n# Title\n- item ![a](b) <b> | `c` *d*"
    card = card_of(
        name=hostile, trained_on=hostile, input_note=hostile, limits=(hostile,), smooth_calls=[hostile],
        license="mit`\nbase_model: a/b", hardness={"act` ![x](y) |": 160.0},
    )  # fmt: skip
    headings, expected = (
        [line for line in found.text.splitlines() if line.startswith("#")] for found in (card, card_of())
    )
    assert headings[1:] == expected[1:]
    assert "\n`mit' base_model: a/b`\n" in card.text
    assert (card.data.license, card.data.base_model) == ("mit`\nbase_model: a/b", None)
    assert "\n- item" not in card.text
    assert "![a]" not in card.text
    assert "| `act' ![x](y) \\|` | 160 |" in card.text
    assert " <b>" not in card.text


def hardened_mlp(act="lambda_gelu"):
    torch.manual_seed(0)
    model = MLPForClassification(MLPConfig(num_features=5, hidden_size=8, num_hidden_layers=2, hidden_act=act))
    anneal_hardness(model, 1.0)
    return model


def test_an_export_comes_with_its_card(tmp_path):
    report = export_relu(hardened_mlp("lambda_silu"), tmp_path / "relu")
    text = (tmp_path / "relu" / "README.md").read_text(encoding="utf-8")
    ModelCard.load(tmp_path / "relu" / "README.md")
    assert text.partition("\n# ")[2].startswith("model-relu\n")
    assert "## Training" not in text
    assert "There is no record of its training" in text
    assert "λ-SiLU" in text
    assert "λ-GELU, a GELU" not in text
    assert "| gate | λ as learned | λ | κ/λ |" in text
    assert "| `layers.1.activation` | 1.0500 | 277.3 | 0.001 |" in text
    assert f"largest change {report.change.largest_change:.3g}" in text
    assert str(tmp_path) not in text
    assert facts_of_folder(tmp_path / "relu") == CheckpointFacts("MLPForClassification")
    export_gelu(hardened_mlp(), tmp_path / "gelu")
    assert "plain GELU computes the same function" in (tmp_path / "gelu" / "README.md").read_text(encoding="utf-8")


def test_the_card_of_a_checkpoint_is_written_beside_it(tmp_path):
    model = hardened_mlp()
    model.save_pretrained(tmp_path)
    elsewhere = tmp_path / "elsewhere.md"
    elsewhere.write_text("mine")
    (tmp_path / "README.md").symlink_to(elsewhere)
    path = write_card(model, tmp_path, license="apache-2.0", repo_id="me/soft")
    card = ModelCard.load(path)
    assert elsewhere.read_text() == "mine"
    assert card.data.license == "apache-2.0"
    assert 'from_pretrained(MLPForClassification, "me/soft")' in card.text
    with pytest.raises(ValueError, match="no λ-GELU"):
        write_card(MLPForClassification(MLPConfig(num_features=5, hidden_act="relu")), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        write_card(model, tmp_path / "nothing")


def test_the_templates_travel_with_the_package():
    assert (ROOT / "model_cards" / "template.md").read_text(encoding="utf-8") == TEMPLATE.read_text(encoding="utf-8")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "export/model_card_template.md" in settings["tool"]["setuptools"]["package-data"]["hf_lgelu"]
