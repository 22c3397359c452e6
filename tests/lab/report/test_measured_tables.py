"""The tables of what was measured, from records small enough to count by hand."""

import pytest
from lgelu_lab.measurements.conversion import CONVERSION_COLUMNS


def cells(table):
    """{(benchmark, network, third cell): {heading: text}}."""
    return {tuple(row[:3]): dict(zip(table.header, row, strict=True)) for row in table.rows}


def verified(model, epsilon, **counts):
    row = dict.fromkeys(
        ("points", "misclassified", "proved", "proved_by_bounds", "refuted", "refuted_by_attack", "unconfirmed"), 0
    )
    row |= {"timeout": 0, "unknown": 0, "median_seconds": 0.5, "max_seconds": 1.25, "refusal": None}
    return row | {"model": model, "epsilon": epsilon, "points": 20} | counts


def refused(model, words):
    return dict.fromkeys(verified(model, 0.1)) | {"model": model, "refusal": words}


def test_proofs_by_hand(measurement_of, table_of):
    first = [refused("gelu", "no Gelu"), verified("hardened_relu", 0.01, proved=20, proved_by_bounds=18)]
    second = [
        refused("gelu", "no Gelu"),
        verified("hardened_relu", 0.01, proved=17, proved_by_bounds=14, refuted=1, refuted_by_attack=1, timeout=2),
    ]
    records = [measurement_of("verification", rows, seed=seed) for seed, rows in enumerate((first, second))]
    elsewhere = measurement_of("int8", [{}], benchmark="mlp-fmnist")
    nowhere = measurement_of("int8", [{}], benchmark="gpt2-wikitext2")
    table = table_of("verification", measurements=[*records, elsewhere, nowhere])
    found = cells(table)
    assert found["mlp-digits", "hardened, swapped", "0.01"] == {
        "Benchmark": "mlp-digits", "Network": "hardened, swapped", "ε": "0.01", "Images": "20",
        "Proved": "18.5 ± 2.1", "by bounds alone": "16 ± 2.8", "Refuted": "0.5 ± 0.7", "by attack": "0.5 ± 0.7",
        "Timeout": "1 ± 1.4", "Unknown": "0 ± 0", "Unconfirmed": "0 ± 0", "Median time, s": "0.50 ± 0.00",
        "Longest, s": "1.2", "Seeds": "2 of 3",
    }  # fmt: skip
    assert list(found["mlp-digits", "GELU", "refused"].values())[3:] == ["–"] * 10 + ["2 of 3"]
    assert len(found) == 2, "what no record says is not called missing"
    assert table.notes[0] == "Refused, GELU: “no Gelu”."


# Zeros, pruning, int8, linear pieces


def pruned(model, criterion, fraction=None, **fields):
    names = ("refusal", "widths", "parameters", "score_pruned", "score_finetuned")
    changes = ("calibration_max_logit_change", "eval_max_logit_change")
    row = dict.fromkeys((*names, *changes)) | {"parameters_before": 1000, "score_before": 0.5}
    rule = None if fraction is None else "fraction"
    return row | {"model": model, "criterion": criterion, "rule": rule, "fraction": fraction} | fields


def done(model, criterion, fraction=None, *, widths="8-8", parameters=500, finetuned=0.5):
    changes = dict.fromkeys(("calibration_max_logit_change", "eval_max_logit_change"), 0.25)
    scores = {"score_pruned": 0.25, "score_finetuned": finetuned}
    return pruned(model, criterion, fraction, widths=widths, parameters=parameters, **changes, **scores)


def only(table, *first):
    (row,) = (row for row in table.rows if tuple(row[: len(first)]) == first)
    return dict(zip(table.header, row, strict=True))


def test_pruning_by_hand_with_what_was_refused(measurement_of, table_of):
    first = [pruned("gelu", "dead", refusal="smooth"), done("relu", "dead", parameters=900)]
    second = [pruned("gelu", "dead", refusal="smooth"), pruned("relu", "dead", refusal="none is dead")]
    records = [measurement_of("pruning", rows, seed=seed) for seed, rows in enumerate((first, second))]
    table = table_of("pruning", measurements=records)
    assert only(table, "mlp-digits", "ReLU from the start", "dead units")["Parameters left, %"] == "90.0 (1 of 2 seeds)"
    assert list(only(table, "mlp-digits", "GELU").values())[2:5] == ["dead units", "–", "–"]
    assert table.rows[1][2] == "dead units", "one seed was pruned"
    assert table.notes == ("Refused, GELU: “smooth”.", "Refused, ReLU from the start: “none is dead”.")


# Conversion


def converted(method, score, rows=None, *, original=0.75, model="gelu", **fields):
    row = dict.fromkeys(CONVERSION_COLUMNS) | {"kl": 0.0125, "agreement": 0.875, "max_logit_change": 2.0}
    row |= {"model": model, "method": method, "rows": rows, "score": score, "original_score": original}
    return row | fields


def not_converted(rows):
    return dict.fromkeys(CONVERSION_COLUMNS) | {
        "model": "gelu", "method": "refit", "rows": rows, "original_score": 0.75, "refusal": "too few",
    }  # fmt: skip


@pytest.fixture
def conversions(measurement_of, summaries):
    def rows(shift, seconds):
        return [
            converted("original", 0.75, kl=0.0),
            converted("direct", 0.5 + shift),
            converted("bias-fold", 0.625, 1438, seconds=1.0),
            not_converted(8) if seconds == 1.0 else converted("refit", 0.625, 8, seconds=1.0),
            converted("refit", 0.75 - shift, 64, seconds=seconds),
            converted("refit", 0.75 + shift, 1438, seconds=seconds),
            converted("hardened", 0.8125, model="hardened_relu", seconds=60.0),
        ]

    models = summaries | {"hardened_relu": summaries["hardened"]}
    return [
        measurement_of("conversion", rows(shift, seconds), seed=seed, models=models)
        for seed, (shift, seconds) in enumerate(((0.0, 1.0), (0.125, 2.0)))
    ]


def test_ways_stand_beside_the_original_seed_by_seed(conversions, table_of):
    table = table_of("conversion", measurements=conversions)
    assert only(table, "mlp-digits", "GELU", "refit", "64") == {
        "Benchmark": "mlp-digits", "Network": "GELU", "Way": "refit", "Calibration rows": "64",
        "Score": "0.6875 ± 0.0884", "Against the original": "−0.0625 ± 0.0884", "KL, nats": "0.0125 ± 0.0000",
        "Same prediction, %": "87.5 ± 0.0", "Largest logit change": "2", "Seeds": "2 of 3",
    }  # fmt: skip
    assert only(table, "mlp-digits", "GELU", "refit", "1,438")["Against the original"] == "+0.0625 ± 0.0884"
    assert only(table, "mlp-digits", "GELU", "original", "–")["Against the original"] == "–"
    hardened = only(table, "mlp-digits", "hardened, swapped", "hardened in training", "–")
    assert hardened["Score"] == "0.8125 ± 0.0000"


def test_perplexity_is_compared_in_per_cent_and_a_change_that_rounds_to_nothing_has_no_sign(
    measurement_of, summaries, table_of
):
    models = {"gelu": summaries["gelu"] | {"metric": "perplexity"}}
    rows = [converted("refit", 101.5, 64, original=100.0), converted("direct", 99.999, original=100.0)]
    table = table_of(
        "conversion", measurements=[measurement_of("conversion", rows, benchmark="gpt2-wikitext2", models=models)]
    )
    assert [row[4:6] for row in table.rows] == [["101.50", "+1.50 %"], ["100.00", "0.00 %"]]
