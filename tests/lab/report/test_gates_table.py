"""The table of the study of gates, from records small enough to count by hand."""

import dataclasses

import pytest
from lgelu_lab.report.gates_table import CONVERTED
from lgelu_lab.studies.experiments import STUDIES, experiment_name

STUDY = STUDIES["gates"]
HARD = [{"a": 1.5, "b": 2.0}, {"a": 80.0, "b": 80.0}, {"a": 100.0, "b": 160.04}]


@pytest.fixture
def run_of(record_of):
    """(which of the study's configurations, seed, last score, last score with ReLU, fields) → its record."""

    def run(place, seed, score, relu, *, benchmark="mlp-adult", **fields):
        configuration = STUDY.configurations(benchmark)[place]
        name = f"gates/{experiment_name(benchmark, configuration, seed)}"
        record = record_of(
            **{"benchmark": benchmark, "seed": seed, "name": name, "model": {"parameters": 1000 + place}},
            **{"scores": (0.5, 0.5, score), "relu_scores": (None, 0.5, relu), **fields},
        )
        record.config.update({name: value for name, value in configuration.items() if name != "save_final_model"})
        if record.config.pop("target_hardness", None) == "measured":
            record.config["measured_targets"] = True
        return record

    return run


def ways(table):
    return {row[1]: dict(zip(table.header, row, strict=True)) for row in table.rows if row[0] == "mlp-adult"}


def test_a_way_stands_beside_the_papers_hardening_seed_by_seed(table_of, run_of):
    paper = [run_of(3, seed, 0.75, 0.75 - 0.25 * seed, hardness=HARD) for seed in (0, 1)]
    other = [run_of(5, seed, 0.5, 0.625, hardness=HARD) for seed in (0, 1)]
    found = ways(table_of("gates", [*paper, *other]))
    row = found["λ-GELU uniform, λ per channel, hardened"]
    # 0.625 − 0.75 and 0.625 − 0.5: mean 0, deviation 0.125·√2, and t of one degree of freedom is 12.706
    assert (row["As is"], row["ReLU"]) == ("0.5000 ± 0.0000", "0.6250 ± 0.0000")
    assert row["Against the paper's"] == "0.0000 (−1.5883 to +1.5883)"
    assert (row["λ, last epoch"], row["Parameters"], row["Seeds"]) == ("100.0 to 160.0", "1,005", "2 of 3")
    assert row["Largest logit change"] == "0.75"
    assert found["λ-GELU uniform, hardened"]["Against the paper's"] == "–"
    assert (found["relu"]["As is"], found["relu"]["ReLU"]) == ("missing", "–")


def test_the_conversion_and_the_steps_come_from_the_measurement(table_of, run_of, measurement_of):
    smooth = run_of(0, 0, 0.75, 0.25)
    models = {"smooth": {"run": smooth.name, "metric": "accuracy", "score": 0.75, "relu_score": 0.25}}
    columns = ("model", "way", "activation", "granularity", "score", "max_logit_change", "step_ratio", "refusal")
    measured = [
        ("smooth", "converted", None, None, 0.625, 3.25, None, None),
        ("smooth", "step", "gelu", "layer", None, None, 1.0, None),
        ("smooth", "step", "lambda_gelu", "layer", None, None, 0.875, None),
    ]
    rows = [dict(zip(columns, row, strict=True)) for row in measured]
    record = measurement_of("gates", rows, benchmark="mlp-adult", models=models)
    runs = [smooth, run_of(3, 0, 0.5, 0.5, hardness=HARD), run_of(4, 0, 0.5, 0.5, hardness=HARD)]
    found = ways(table_of("gates", runs, [record]))
    assert (found[CONVERTED]["As is"], found[CONVERTED]["Largest logit change"]) == ("–", "3.2")
    assert found[CONVERTED]["ReLU"].startswith("0.6250")
    assert found[CONVERTED]["Against the paper's"].startswith("+0.1250 (")
    assert [found[way]["Step"] for way in ("GELU", CONVERTED, "λ-GELU uniform, hardened")] == ["1.00", "–", "0.88"]
    refused = dataclasses.replace(record, rows=({**rows[0], "score": None, "refusal": "no"}, *rows[1:]))
    assert ways(table_of("gates", runs, [refused]))[CONVERTED]["ReLU"] == "–"
