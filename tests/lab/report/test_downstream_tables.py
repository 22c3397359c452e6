from dataclasses import replace

import pytest
from lgelu_lab.report.downstream.tables.basis import measured_with_table
from lgelu_lab.report.downstream.tables.networks import networks_table
from lgelu_lab.report.downstream.tables.verification import verification_table


def cells(table):
    """{(benchmark, network, third cell): {heading: text}}."""
    return {tuple(row[:3]): dict(zip(table.header, row, strict=True)) for row in table.texts}


def verified(model, epsilon, **counts):
    row = dict.fromkeys(
        ("points", "misclassified", "proved", "proved_by_bounds", "refuted", "refuted_by_attack", "unconfirmed"), 0
    )
    row |= {"timeout": 0, "unknown": 0, "median_seconds": 0.5, "max_seconds": 1.25, "refusal": None}
    return row | {"model": model, "epsilon": epsilon, "points": 20} | counts


def refused(model, words):
    return dict.fromkeys(verified(model, 0.1)) | {"model": model, "refusal": words}


def test_networks_are_counted_once_however_often_they_were_measured(measurement_of, summaries):
    relu = {"relu": summaries["relu"]}
    other = {**summaries, "gelu": {**summaries["gelu"], "score": 0.25}}
    other["hardened"] = {**summaries["hardened"], "score": 0.625}
    records = [
        measurement_of("int8", [{"model": "gelu"}]),
        measurement_of("pruning", [{"model": "gelu"}]),
        measurement_of("int8", [{"model": "gelu"}], seed=1, models=other),
        measurement_of("int8", [{"model": "gelu"}], benchmark="mlp-fmnist", models=relu),
    ]
    assert networks_table(records).texts == [
        ["mlp-digits", "GELU", "accuracy", "0.5000 ± 0.3536", "0.5000 ± 0.0000", "–", "2 of 3"],
        ["mlp-digits", "ReLU from the start", "accuracy", "0.6250 ± 0.0000", "–", "–", "2 of 3"],
        ["mlp-digits", "λ-GELU hardened", "accuracy", "0.7500 ± 0.1768", "0.8750 ± 0.0000", "160.0", "2 of 3"],
        ["mlp-fmnist", "ReLU from the start", "accuracy", "0.6250", "–", "–", "1 of 3"],
    ]


def test_perplexity_has_two_digits_and_says_that_lower_is_better(measurement_of, summaries):
    summary = summaries["gelu"] | {"metric": "perplexity", "score": 105.125}
    table = networks_table([measurement_of("int8", [{"model": "gelu"}], models={"gelu": summary})])
    assert table.texts[0][2:4] == ["perplexity (lower is better)", "105.12"]


@pytest.mark.parametrize("other", ["hardened", "hardened_relu"])
def test_measurements_of_networks_trained_anew_do_not_mix(measurement_of, summaries, other):
    changed = {other: summaries["hardened"] | {"score": 0.1}}
    records = [measurement_of("int8", [{"model": "gelu"}]), measurement_of("pruning", [{}], models=changed)]
    with pytest.raises(ValueError, match="seed 0, were made on different networks 'hardened"):
        networks_table(records)


def test_settings_seconds_and_machines_by_hand(measurement_of):
    records = [measurement_of("int8", [{}]), measurement_of("int8", [{}], seed=2, seconds=99.6)]
    assert measured_with_table(records).texts == [
        ["int8", "mlp-digits", "0, 2", "points 4; epsilons 0.01, 0.5", "12.4, 99.6", "abacus, 1 thread"],
    ]
    assert measured_with_table(records).notes == ("Versions: torch 1.",)
    left_open = replace(records[0], settings={"learning_rates": [], "rows": 8})
    assert measured_with_table([left_open]).texts[0][3] == "learning rates of the benchmark; rows 8"


def test_proofs_by_hand(measurement_of):
    first = [refused("gelu", "no Gelu"), verified("hardened_relu", 0.01, proved=20, proved_by_bounds=18)]
    second = [
        refused("gelu", "no Gelu"),
        verified("hardened_relu", 0.01, proved=17, proved_by_bounds=14, refuted=1, refuted_by_attack=1, timeout=2),
    ]
    records = [measurement_of("verification", rows, seed=seed) for seed, rows in enumerate((first, second))]
    elsewhere = measurement_of("int8", [{}], benchmark="mlp-fmnist")
    nowhere = measurement_of("int8", [{}], benchmark="gpt2-wikitext2")
    table = verification_table([*records, elsewhere, nowhere])
    found = cells(table)
    assert found["mlp-digits", "hardened, swapped", "0.01"] == {
        "Benchmark": "mlp-digits", "Network": "hardened, swapped", "ε": "0.01", "Images": "20",
        "Proved": "18.5 ± 2.1", "by bounds alone": "16 ± 2.8", "Refuted": "0.5 ± 0.7", "by attack": "0.5 ± 0.7",
        "Timeout": "1 ± 1.4", "Unknown": "0 ± 0", "Unconfirmed": "0 ± 0", "Median time, s": "0.50 ± 0.00",
        "Longest, s": "1.2", "Seeds": "2 of 3",
    }  # fmt: skip
    assert list(found["mlp-digits", "GELU", "refused"].values())[3:] == ["–"] * 10 + ["2 of 3"]
    assert list(found["mlp-fmnist", "all", "missing"].values())[3:] == ["–"] * 11
    assert len(found) == 3, "GPT-2 cannot be verified, and is not called missing"
    assert table.notes[0] == "Refused, GELU: “no Gelu”."


def test_another_number_of_images_is_not_hidden(measurement_of):
    records = [measurement_of("verification", [verified("relu", 0.1, points=p)], seed=p) for p in (20, 5)]
    assert cells(verification_table(records))["mlp-digits", "ReLU from the start", "0.1"]["Images"] == "5 or 20"
