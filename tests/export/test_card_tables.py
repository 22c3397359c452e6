"""The tables of a conversion's card: cells read back are the numbers that went in, and nothing is left out."""

import dataclasses
import re

from report_by_hand import REPORT, SECOND, distance

from hf_lgelu.export.card import CheckpointFacts, Provenance, render_conversion_card
from hf_lgelu.refit.report import Evaluation
from hf_lgelu.refit.verdict import conversion_warnings


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


def section(report, title):
    """The part of the card of a report below a title."""
    card = render_conversion_card(report, Provenance("a", "b", 3), CheckpointFacts("GPT2LMHeadModel"))
    return re.split(r"\n##+ ", str(card).split(f" {title}\n", 1)[1])[0]


def test_numbers_of_the_whole_network():
    held_out, second = tables_of(section(REPORT, "Results"))
    assert [row["network"] for row in held_out] == ["original", "plain swap", "converted"]
    assert [row["KL to the original (nats)"] for row in held_out] == ["0", "0.5", "0.00125"]
    assert [row["same prediction"] for row in held_out] == ["100 %", "50.00 %", "99.99 %"]
    assert [row["largest logit change"] for row in held_out] == ["0", "12.5", "0.5"]
    assert [row["relative error (share of squares)"] for row in held_out] == ["0", "0.25", "0.0003"]
    assert "perplexity" not in held_out[0]
    assert [row["perplexity"] for row in second] == ["113.19", "292.36", "113.42"]
    assert [row["same prediction"] for row in second] == ["100 %", "25.00 %", "100 %"]


def test_numbers_of_the_layers():
    (layers,) = tables_of(section(REPORT, "Layers"))
    assert [row["layer"] for row in layers] == ["`h.0.mlp.c_proj`", "`h.1.mlp.c_proj`", "`conv2`, `downsample.0`"]
    assert [row["choice"] for row in layers] == ["refit", "bias only", "kept"]
    assert [row["α"] for row in layers] == ["0.001", "–", "–"]
    assert [row["error, weights kept"] for row in layers] == ["0.25", "0.5", "0.03"]
    assert [row["error, as chosen"] for row in layers] == ["0.0123", "0.4", "0.03"]
    assert [row["live"] for row in layers] == ["50.00 %", "25.00 %", "–"]
    assert [(row["features"], row["rows"]) for row in layers] == [("512", "6,144"), ("512", "6,144"), ("576", "6,144")]
    assert [row["note"] for row in layers] == ["", r"few rows \| d", ""]


def test_outputs_that_are_no_logits_have_no_kl():
    without = dataclasses.replace(
        SECOND,
        direct=dataclasses.replace(SECOND.direct, kl=None),
        refitted=dataclasses.replace(SECOND.refitted, kl=None),
    )
    report = dataclasses.replace(REPORT, held_out=without, evaluation=None)
    (held_out,) = tables_of(section(report, "Results"))
    assert [row.pop("relative error (share of squares)") for row in held_out] == ["0", "0.75", "0.0005"]
    assert [row.pop("largest change") for row in held_out] == ["0", "25", "0.75"]
    assert {column for row in held_out for column in row} == {"network", "perplexity"}
    told = [line.split() for line in str(report).splitlines()]
    assert [line for line in told if line[:1] in (["original"], ["plain"], ["converted"])] == [
        ["original", "0", "113.19"],
        ["plain", "swap", "0.75", "292.36"],
        ["converted", "0.0005", "113.42"],
    ]


def test_embeddings_have_cosines_and_neighbours_and_no_predictions():
    swapped = {"cosine": 0.58849, "least_cosine": 0.367, "same_neighbour": 0.38}
    nearer = {"cosine": 0.985, "least_cosine": 0.93, "same_neighbour": 0.81}
    direct = distance(None, None, 12.5, 0.5, embedding=swapped)
    refitted = distance(None, None, 0.5, 0.0296, embedding=nearer)
    of_embeddings = Evaluation(rows=4096, samples=400, original_metrics={}, direct=direct, refitted=refitted)
    report = dataclasses.replace(REPORT, held_out=of_embeddings, evaluation=None)
    page, text = section(report, "Results"), str(report)
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
