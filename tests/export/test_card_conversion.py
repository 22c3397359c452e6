"""The card of a converted network: its header, what it says of how it was made, and what it must not say."""

import dataclasses

import pytest
import torch
from huggingface_hub import ModelCard
from report_by_hand import REPORT

from hf_lgelu.export.card import CheckpointFacts, Provenance, facts_of_folder, render_conversion_card, stated_licence
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.refit.convert import convert_to_relu

PROVENANCE = Provenance(
    model="someone/gpt2-small", model_is_on_hub=True, data="someone/texts, split train", samples=66, seed=3,
    evaluation="someone/texts, split test",
    created="2026-03-04T05:06:07+00:00",
    versions={"python": "3.11.7", "torch": "2.15.0"},
    hardware={"cpu": "AMD EPYC", "cpu_cores": 2, "accelerators": ["NVIDIA X"], "processes": 2},
)  # fmt: skip
FACTS = CheckpointFacts("GPT2LMHeadModel")


def card_of(report=REPORT, provenance=PROVENANCE, facts=FACTS, **options):
    card = render_conversion_card(report, provenance, facts, **options)
    return ModelCard(str(card))  # read again, as the Hub reads it


def section(card, title):
    """The text below a heading, up to the next one of its level or a higher one."""
    level = title.partition(" ")[0]
    text = card.text.split(f"\n{title}\n", 1)[1]
    for stop in range(2, len(level) + 1):
        text = text.split(f"\n{'#' * stop} ", 1)[0]
    return text


def test_header():
    data = card_of(repo_id="me/gpt2-relu", license="mit").data
    assert (data.base_model, data.license, data.pipeline_tag) == ("someone/gpt2-small", "mit", "text-generation")
    assert {"relu", "relufication"} <= set(data.tags)


def test_a_local_original_is_no_base_model():
    local = dataclasses.replace(PROVENANCE, model="gpt2-ours", model_is_on_hub=False)
    card = card_of(provenance=local)
    assert card.data.base_model is None
    assert "`gpt2-ours` with ReLU" in card.text
    assert "huggingface.co" not in card.text
    assert card.text.startswith("\n# gpt2-ours-relu\n")


def test_the_cards_code_computes_the_saved_network(tmp_path, monkeypatch):
    model = MLPForClassification(MLPConfig(num_features=5, hidden_size=8, num_hidden_layers=2, hidden_act="gelu"))
    # So many rows that rounding decides nothing: with seeds 0 to 5 the KL was at most 0.6 of the plain swap's.
    converted, report = convert_to_relu(model, torch.randn(400, 5))
    converted.save_pretrained(tmp_path)
    local = dataclasses.replace(PROVENANCE, model="ours", model_is_on_hub=False)
    card = card_of(report, local, facts_of_folder(tmp_path))
    assert card.data.tags == ["relu", "relufication", "lambda-gelu"]
    assert card.text.startswith("\n# ours-relu\n")
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(card.text.split("Without hf_lgelu:\n\n```python\n")[1].split("```")[0], found)
    rows = 4 * torch.randn(64, 5)
    torch.testing.assert_close(found["model"](rows), MLPForClassification.from_pretrained(tmp_path)(rows).logits)


@pytest.mark.parametrize(
    ("header", "licence"),
    [
        ("license: mit\ntags: [x]", "mit"),
        ('license: "apache-2.0"', "apache-2.0"),
        ("license: [mit, other]", None),
        ("license: *anchor", None),
        ("license: {", None),
    ],
)
def test_the_licence_of_the_originals_card(header, licence, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n# Card\nlicense: gpl\n")
    assert stated_licence(tmp_path) == licence
