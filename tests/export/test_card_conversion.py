"""The card of a converted network: its header, what it says of how it was made, and what it must not say."""

import dataclasses
import re

import pytest
import torch
from huggingface_hub import ModelCard
from report_by_hand import REPORT, distance

from hf_lgelu.export.card import Provenance, render_conversion_card, stated_licence
from hf_lgelu.models.checkpoint import CheckpointFacts, facts_of_folder
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.refit.convert import convert_to_relu
from hf_lgelu.refit.report import Evaluation
from hf_lgelu.refit.verdict import conversion_warnings

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


def tables_of(page):
    """Every table of the page as [{column: cell}]."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n?)+", page, re.MULTILINE):
        rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]] for line in block.strip().splitlines()
        ]
        assert {len(row) for row in rows} == {len(rows[0])}
        tables.append([dict(zip(rows[0], row, strict=True)) for row in rows[2:]])
    return tables


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


def test_numbers_of_the_whole_network():
    held_out, second = tables_of(section(card_of(), "## Results"))
    assert [row["network"] for row in held_out] == ["original", "plain swap", "converted"]
    assert [row["KL to the original (nats)"] for row in held_out] == ["0", "0.5", "0.00125"]
    assert [row["same prediction"] for row in held_out] == ["100 %", "50.00 %", "99.99 %"]
    assert [row["largest logit change"] for row in held_out] == ["0", "12.5", "0.5"]
    assert [row["relative error (share of squares)"] for row in held_out] == ["0", "0.25", "0.0003"]
    assert "perplexity" not in held_out[0]
    assert [row["perplexity"] for row in second] == ["113.19", "292.36", "113.42"]
    assert [row["same prediction"] for row in second] == ["100 %", "25.00 %", "100 %"]


def test_numbers_of_the_layers():
    (layers,) = tables_of(section(card_of(), "### Layers"))
    assert [row["layer"] for row in layers] == ["`h.0.mlp.c_proj`", "`h.1.mlp.c_proj`", "`conv2`, `downsample.0`"]
    assert [row["choice"] for row in layers] == ["refit", "bias only", "unchanged"]
    assert [row["α"] for row in layers] == ["0.001", "–", "–"]
    assert [row["error, weights kept"] for row in layers] == ["0.25", "0.5", "0.03"]
    assert [row["error, as chosen"] for row in layers] == ["0.0123", "0.4", "0.03"]
    assert [row["live"] for row in layers] == ["50.00 %", "25.00 %", "–"]
    assert [(row["features"], row["rows"]) for row in layers] == [("512", "6,144"), ("512", "6,144"), ("576", "6,144")]
    assert [row["note"] for row in layers] == ["", r"few rows \| d", ""]


def test_embeddings_have_cosines_and_neighbours_and_no_predictions():
    swapped = {"cosine": 0.58849, "least_cosine": 0.367, "same_neighbour": 0.38}
    nearer = {"cosine": 0.985, "least_cosine": 0.93, "same_neighbour": 0.81}
    direct = distance(None, None, 12.5, 0.5, embedding=swapped)
    refitted = distance(None, None, 0.5, 0.0296, embedding=nearer)
    of_embeddings = Evaluation(rows=4096, samples=400, original_metrics={}, direct=direct, refitted=refitted)
    report = dataclasses.replace(REPORT, held_out=of_embeddings, evaluation=None)
    page, text = section(card_of(report), "## Results"), str(report)
    (held_out,) = tables_of(page)
    assert [row.pop("cosine to the original") for row in held_out] == ["1.0000", "0.5885", "0.9850"]
    assert [row.pop("least cosine") for row in held_out] == ["1.0000", "0.3670", "0.9300"]
    assert [row.pop("same nearest neighbour among these") for row in held_out] == ["100 %", "38.00 %", "81.00 %"]
    assert [row.pop("relative error (share of squares)") for row in held_out] == ["0", "0.5", "0.0296"]
    assert {column for row in held_out for column in row} == {"network"}
    assert "On the inputs held out of the data (400 inputs):" in text
    assert re.search(r"\n +converted +0\.9850 +0\.9300 +81\.00 %\n", text)
    assert "predict" not in page + text
    (warning,) = (found for found in conversion_warnings(report, 0.1) if "embeddings" in found)
    assert "same nearest neighbour among these 81.00 %" in warning
    near = dataclasses.replace(refitted, embedding=nearer | {"same_neighbour": 0.97})
    report = dataclasses.replace(report, held_out=dataclasses.replace(of_embeddings, refitted=near))
    assert not any("embeddings" in found for found in conversion_warnings(report, 0.1))


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
    rows = 4 * torch.randn(64, 5)
    for code in (part.split("```")[0] for part in card.text.split("```python\n")[1:]):  # without hf_lgelu, and with it
        exec(code.replace("FOLDER", "."), found := {})
        given = found["model"](rows)
        torch.testing.assert_close(given if isinstance(given, torch.Tensor) else given.logits, converted(rows).logits)
    assert isinstance(found["model"], MLPForClassification)
    assert card.text.count("```python\n") == 2


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
