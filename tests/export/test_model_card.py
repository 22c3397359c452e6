"""Model cards: a whole one against expected_card.md, and what each says of its network."""

import dataclasses
import json
import os
import struct
import tomllib
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from hf_lgelu import (
    CardData,
    CardFacts,
    CardScores,
    MLPConfig,
    MLPForClassification,
    anneal_hardness,
    export_relu,
    load_card_facts,
    save_card_facts,
    write_card,
)
from hf_lgelu.export.hub.card import TEMPLATE, render_card
from hf_lgelu.export.hub.card_text import pipeline_tag
from hf_lgelu.export.hub.hub_id import is_hub_id
from hf_lgelu.export.hub.loading import CheckpointFacts, facts_of_folder
from hf_lgelu.models.comparison import OutputChange

ROOT = Path(__file__).parents[2]
SECRET = "/home/alice/private/hf_models/gpt2-ours"
TOKEN = "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH"

FACTS = CardFacts(
    name="letters",
    trained_on="the letters of our archive",
    hardness={"layers.0.activation": 159.57691, "layers.1.activation": 80.0},
    hardened=True,
    earlier_hardness={
        "before training": {"layers.0.activation": 1.0067, "layers.1.activation": 2.0},
        "as learned": {"layers.1.activation": 3.5},
    },
    scores=CardScores(
        "accuracy", 0.85678, loss=0.31234, relu_score=0.85647, relu_loss=0.31239, relu_max_logit_change=0.00246,
        relu_unchanged_predictions=0.99996, epoch=2, seed=3, whole_split=True,
    ),
    data=CardData("someone/letters", 3256, "test", 20000, hub_id="someone/letters", limits=("half of it was used",)),
    recipe={"parameters": "225,796", "optimizer": "sgd", "learning rate": 0.05, "autocast": False},
    seconds=1234.5,
    created="2026-03-04T05:06:07+00:00",
    versions={"python": "3.11.7", "torch": "2.15.0"},
    hardware={
        "cpu": "AMD EPYC", "cpu_cores": 2, "accelerators": ["NVIDIA X"], "processes": 2, "threads_per_process": 1,
        "platform": "Linux-6.1.0-alices-laptop-x86_64-with-glibc2.36",
    },
    change=OutputChange(max_change=0.00123, largest_output=4.5, unchanged_predictions=1.0, rows=64),
    input_note="Pixels are divided by 255.",
    limits=("The numbers are of one run.",),
    license="mit",
    checkpoint=CheckpointFacts("MLPForClassification", layers=2),
)  # fmt: skip


def with_facts(**changes):
    return dataclasses.replace(FACTS, **changes)


def test_a_change_by_an_export_is_told_of_what_was_exported():
    """A λ-GELU network's card said "On the example inputs of the export, : largest change …"."""
    assert "On the example inputs" not in str(render_card(FACTS, export="lambda_gelu"))
    for export, how in (("relu", "the swap to ReLU"), ("gelu", "λ was folded into the weights")):
        assert f"On the example inputs of the export, after {how}: {FACTS.change}." in str(
            render_card(FACTS, export=export)
        )


def test_whole_card():
    card = render_card(FACTS, figure="hardness.png", repo_id="someone/letters-relu")
    expected = (Path(__file__).parent / "expected_card.md").read_text(encoding="utf-8")
    assert f"{card}\n" == expected


@pytest.mark.parametrize("export", ["relu", "gelu", "lambda_gelu"])
def test_header_survives_huggingface_hub(export):
    card = render_card(with_facts(base_model="a/b"), export=export, repo_id="someone/letters")
    data = ModelCard(str(card)).data
    assert (data.license, data.base_model, data.datasets) == ("mit", "a/b", ["someone/letters"])
    assert data.pipeline_tag == "tabular-classification"
    (result,) = data.eval_results
    assert result.metric_value == {"relu": 0.8565, "gelu": 0.8568, "lambda_gelu": 0.8568}[export]
    assert (result.metric_type, result.dataset_split, data.model_name) == ("accuracy", "test", "letters")
    assert ("relu" in data.tags) == (export == "relu")


def test_each_form_says_what_it_is():
    relu, gelu, soft = (render_card(FACTS, export=export).text for export in ("relu", "gelu", "lambda_gelu"))
    assert "has ReLU in the place of each gate" in relu
    assert "torch.nn.ReLU()" in relu
    assert "plain GELU computes the same function" in gelu
    assert "torch.nn.GELU()" in gelu
    assert "Without hf_lgelu" not in soft
    assert "| λ-GELU, as trained (this model) | 0.8568 |" in soft
    assert "mlp.py" not in relu
    carried = with_facts(checkpoint=dataclasses.replace(FACTS.checkpoint, own_code=True))
    assert "trust_remote_code=True" in render_card(carried).text


@pytest.mark.parametrize(
    ("gate", "kappa", "formula", "plain"),
    [
        ("lambda_gelu", 0.16997, "x·Φ(λx)", "GELU()"),
        ("lambda_gelu_tanh", 0.16997, "tanh(", 'GELU(approximate="tanh")'),
        ("lambda_silu", 0.27846, "x·σ(λx)", "SiLU()"),
    ],
)
def test_the_card_speaks_of_the_gate_that_the_network_has(gate, kappa, formula, plain):
    """κ by hand: the largest u·(1 − G(u)) on a fine grid."""
    u = torch.linspace(0, 8, 800_001, dtype=torch.float64)
    step = {
        "lambda_gelu": torch.special.ndtr(u),
        "lambda_gelu_tanh": 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (u + 0.044715 * u**3))),
        "lambda_silu": torch.sigmoid(u),
    }[gate]
    exact = (u * (1 - step)).max().item()
    assert exact == pytest.approx(kappa, abs=2e-4)
    text = render_card(
        with_facts(gates={"act": gate}, hardness={"act": 100.0}, earlier_hardness={}), export="gelu"
    ).text
    assert f"κ = {exact:.5f}." in text
    assert f"| `act` | 100 | {exact / 100:.2g} |" in text
    assert formula in text
    assert f"torch.nn.{plain}" in text
    assert ("λ-GELU" in text.partition("## Citation")[0]) == (gate != "lambda_silu")
    with pytest.raises(ValueError, match="unknown gate 'lambda_mish'"):
        render_card(with_facts(gates={"layers.1.activation": "lambda_mish"}))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("MLPForClassification", "tabular-classification"),
        ("SentenceTransformer", "sentence-similarity"),
        ("GPT2LMHeadModel", "text-generation"),
        ("BlipTextLMHeadModel", "text-generation"),  # in no table of transformers
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
    assert pipeline_tag(name) == task


def test_what_the_hub_could_not_have_or_is_named_like_a_file_is_no_id():
    assert all(map(is_hub_id, ("gpt2", "bob/gpt2", "bob_1/gpt-2.0")))
    assert not any(map(is_hub_id, (None, "", "rows.csv", "data/rows.csv", "bob/gpt--2", "bob/gpt2.git", "bob/größe",
                                   "~bob/gpt2", "a/b/c", "bob/" + "a" * 97)))  # fmt: skip


@pytest.mark.parametrize("path", [SECRET, "./alice/gpt2-ours", "~/alice/gpt2-ours", "C:\\alice\\gpt2-ours"])
def test_of_a_path_only_its_last_part_is_shown(path):
    text = str(render_card(with_facts(recipe={"started from": path}, base_model=path)))
    assert "| started from | gpt2-ours |" in text
    assert "alice" not in text
    assert "base_model" not in text


def test_an_address_is_shown_without_what_is_secret():
    address = f"https://alice:{TOKEN}@hub.local/a/gpt2?token=x"
    text = str(render_card(with_facts(recipe={"started from": address}, base_model=address)))
    assert "| started from | gpt2 |" in text
    assert "alice" not in text
    assert "hub.local" not in text


def test_a_local_folder_that_looks_like_a_hub_id(tmp_path, monkeypatch):
    def card_of(model):
        return render_card(with_facts(recipe={"started from": model}, base_model=model))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "alice" / "gpt2").mkdir(parents=True)
    assert "alice" not in str(card_of("alice/gpt2"))
    (tmp_path / "ours").mkdir()
    assert card_of("ours").data.base_model is None
    assert "| started from | bob/gpt2 |" in card_of("bob/gpt2").text
    assert card_of("bob/gpt2").data.base_model == "bob/gpt2"


@pytest.mark.parametrize(
    "leaking",
    [{"recipe": {"started from": TOKEN}}, {"input_note": f"Log in with {TOKEN}."}, {"trained_on": TOKEN}],
    ids=lambda leaking: next(iter(leaking)),
)
def test_a_token_that_would_be_shown_stops_the_card(leaking):
    with pytest.raises(ValueError, match="access token") as refusal:
        render_card(with_facts(**leaking))
    assert "abcdef" not in str(refusal.value)


HOSTILE = "x\n# Title\n- item ![a](b) <b> | `c` *d*"


def test_texts_of_others_are_text_on_the_card():
    facts = with_facts(
        name=HOSTILE, trained_on=HOSTILE, input_note=HOSTILE, limits=(HOSTILE,), recipe={HOSTILE: HOSTILE},
        data=CardData(HOSTILE, 3, HOSTILE, 4, limits=(HOSTILE,)), versions={HOSTILE: HOSTILE},
        hardware={"cpu": HOSTILE}, created=HOSTILE, hardness={"act` ![x](y) |": 160.0}, earlier_hardness={},
        scores=dataclasses.replace(FACTS.scores, metric=HOSTILE),
    )  # fmt: skip
    card = ModelCard(str(render_card(facts)))
    headings = [line for line in card.text.splitlines() if line.startswith("#")]
    expected = [line for line in render_card(FACTS).text.splitlines() if line.startswith("#")]
    assert headings[1:] == expected[1:]
    assert "\n- item" not in card.text
    assert "![a]" not in card.text
    assert "| `act' ![x](y) \\|` | 160 |" in card.text
    assert " <b>" not in card.text
    assert len({line.count("|") - line.count("\\|") for line in card.text.splitlines() if line.startswith("| x")}) == 1


@pytest.mark.parametrize("licence", ["mit\nbase_model: evil/model", "mit`", "", "a" * 99, "[mit](x)"])
def test_a_licence_is_a_name(licence):
    with pytest.raises(ValueError, match="short name"):
        render_card(with_facts(license=licence))
    assert "None was stated" in render_card(with_facts(license=None)).text
    assert "license" not in str(render_card(with_facts(license=None)).data)


def test_a_repository_is_named_as_the_hub_names_it():
    with pytest.raises(ValueError, match="Repo id"):
        render_card(FACTS, repo_id='x")\nimport os  # ')


def test_a_relu_model_that_was_not_evaluated_has_no_result():
    facts = with_facts(scores=CardScores("accuracy", 0.85678, whole_split=True))
    card = render_card(facts, repo_id="someone/letters-relu")
    assert ModelCard(str(card)).data.eval_results is None
    assert "| λ-GELU, as trained | 0.8568 |" in card.text
    assert "(this model)" not in card.text


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": dataclasses.replace(FACTS.scores, whole_split=False)},
        {"data": dataclasses.replace(FACTS.data, hub_id=None)},
    ],
    ids=["a part of the split", "other data"],
)
def test_shortened_data_are_no_result_on_the_hubs_data_set(changes):
    data = render_card(with_facts(**changes)).data
    assert data.eval_results is None
    assert "model-index" not in data.to_yaml()


def test_folder_gets_card_and_picture(tmp_path):
    torch.manual_seed(0)
    model = MLPForClassification(MLPConfig(num_features=5, hidden_size=8, num_hidden_layers=2))
    anneal_hardness(model, 1.0)
    report = export_relu(model, tmp_path / "relu")
    elsewhere = tmp_path / "elsewhere.md"
    elsewhere.write_text("mine")
    (tmp_path / "relu" / "README.md").symlink_to(elsewhere)
    (tmp_path / "relu" / "hardness.png").symlink_to(elsewhere)
    path = write_card(tmp_path / "relu", CardFacts(report.hardness, change=report.change, license="mit"))
    assert elsewhere.read_text() == "mine"
    text = path.read_text(encoding="utf-8")
    assert "## Training" not in text
    assert "There is no record of its training" in text
    assert "| `layers.1.activation` | 159.6 | 0.0011 |" in text
    assert f"largest change {report.change.max_change:.3g}" in text
    assert "![Hardness λ of each gate](hardness.png)" in text
    assert str(tmp_path) not in text
    picture = (tmp_path / "relu" / "hardness.png").read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    assert (picture[:8], width, height) == (b"\x89PNG\r\n\x1a\n", 720, 312)
    assert facts_of_folder(tmp_path / "relu") == CheckpointFacts("MLPForClassification", 2)
    ModelCard.load(path)


def test_bad_input():
    with pytest.raises(ValueError, match="unknown export 'onnx'; accepted: relu, gelu, lambda_gelu"):
        render_card(FACTS, export="onnx")
    with pytest.raises(ValueError, match="its facts need hardness"):
        render_card(with_facts(hardness={}))
    with pytest.raises(ValueError, match="its facts need hardness"):
        render_card(with_facts(checkpoint=None))
    with pytest.raises(ValueError, match="``` would end its block"):
        render_card(with_facts(loading_code={"relu": "```\n# mine"}))


def test_facts_travel_as_json(tmp_path):
    path = save_card_facts(FACTS, tmp_path)
    # JSON knows lists alone: those of hardware come back as they can be told apart from none.
    again = load_card_facts(path)
    assert str(render_card(again)) == str(render_card(FACTS))
    assert dataclasses.replace(again, hardware={}) == dataclasses.replace(FACTS, hardware={})
    assert load_card_facts(tmp_path) == again


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hardness": {"act": "160"}}, "hardness must be"),
        ({"hardness": None}, "hardness must be"),
        ({"scores": {"metric": "accuracy"}}, "scores lacks score"),
        ({"scores": {"metric": "accuracy", "score": "0.9"}}, "scores: score must be"),
        ({"scores": {"metric": "accuracy", "score": True}}, "scores: score must be"),
        ({"data": []}, "data must be an object"),
        ({"seconds": "long"}, "seconds must be"),
        ({"limits": [1]}, "limits must be"),
        ({"other": 1}, "must be an object with the keys hardness"),
    ],
)
def test_facts_that_are_none_are_refused_by_name(tmp_path, change, named):
    (tmp_path / "card_facts.json").write_text(json.dumps({"hardness": {"act": 160.0}} | change))
    with pytest.raises(ValueError, match=named):
        load_card_facts(tmp_path)


def test_a_file_that_is_no_json_is_refused_by_its_path(tmp_path):
    for content in (b"{", b"\xff\xfe"):
        (tmp_path / "card_facts.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"card_facts\.json holds no facts"):
            load_card_facts(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_card_facts(tmp_path / os.devnull.strip("/"))


def test_the_template_is_one_and_travels_with_the_package():
    assert (ROOT / "model_cards" / "template.md").read_text(encoding="utf-8") == TEMPLATE.read_text(encoding="utf-8")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "export/hub/model_card_template.md" in settings["tool"]["setuptools"]["package-data"]["hf_lgelu"]
    citation = TEMPLATE.read_text(encoding="utf-8").partition("```bibtex\n")[2].partition("```")[0]
    assert citation in (ROOT / "README.md").read_text(encoding="utf-8")


def test_of_several_hardnesses_the_smallest_bounds_the_swap():
    """Of λ = 1 and three of 400, by the functions themselves; the other gate has one λ."""
    x = torch.linspace(-6, 6, 120_001, dtype=torch.float64)
    exact = max((x * torch.special.ndtr(value * x) - x.relu()).abs().max().item() for value in (1.0, 400.0))
    facts = with_facts(
        hardness={"a": 1.0, "b": 50.0}, mean_hardness={"a": 300.25}, earlier_hardness={"as learned": {"a": 1.5}}
    )
    text = render_card(facts).text
    assert f"at most κ/λ, κ = {exact:.5f}. Of a gate with several λ the smallest bounds that." in text
    assert "| gate | mean λ as learned | mean λ | smallest λ | κ/λ |" in text
    assert f"| `a` | 1.5000 | 300.2 | 1 | {exact:.2g} |" in text
    assert f"| `b` | – | 50 | 50 | {exact / 50:.2g} |" in text
    assert "Its 2 gates ended at λ from 1 to 50 (the smallest λ of each gate) after hardening." in text


def test_facts_of_before_are_read(tmp_path):
    """As 0.1.0 and early 0.2.0 wrote them: no mean_hardness, and gates that are rows of GATES."""
    facts = {"hardness": {"a": 160.0, "b": 160.0}, "name": "letters", "gates": {"b": "lambda_silu"}, "license": "mit"}
    (tmp_path / "card_facts.json").write_text(json.dumps(facts))
    loaded = load_card_facts(tmp_path)
    assert loaded == CardFacts({"a": 160.0, "b": 160.0}, "letters", gates={"b": "lambda_silu"}, license="mit")
    text = render_card(dataclasses.replace(loaded, checkpoint=FACTS.checkpoint)).text
    assert "| gate | λ | κ/λ |" in text
    assert "| `b` | 160 | 0.0017 |" in text  # κ = 0.27846


def test_a_card_of_another_gate_has_its_names_and_its_bound():
    facts = CardFacts({"a": 100.0, "b": 100.0}, gates={"b": "lambda_silu"}, checkpoint=FACTS.checkpoint)
    text = str(render_card(facts, export="lambda_gelu"))
    assert "Its activation is λ-GELU and λ-SiLU, a GELU or SiLU whose gates learn how hard they are." in text
    assert "| `a` | 100 | 0.0017 |" in text
    assert "| `b` | 100 | 0.0028 |" in text  # κ = 0.2785
