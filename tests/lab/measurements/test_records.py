import dataclasses
import json

import pytest
from lgelu_lab.measurements.records import MeasurementRecord, read_measurement, read_measurements, write_measurement


def record_of(**fields):
    made = MeasurementRecord(
        measurement="zeros", benchmark="mlp-digits", seed=1, created="2026-01-01T00:00:00+00:00", seconds=2.5,
        settings={"samples": 8, "epsilons": [0.1]},
        models={"relu": {"run": "downstream/mlp-digits/relu-seed1", "metric": "accuracy", "score": 0.5,
                         "relu_score": None, "target_hardness": None}},
        rows=({"model": "relu", "zeros": 0.5}, {"model": "gelu", "zeros": None}),
        versions={"torch": "2"}, hardware={"cpu": "abacus"},
    )  # fmt: skip
    return dataclasses.replace(made, **fields)


def test_a_record_comes_back_equal_from_its_own_place(tmp_path):
    path = write_measurement(record_of(), tmp_path)
    assert path == tmp_path / "mlp-digits" / "zeros-seed1.json"
    assert read_measurement(path) == record_of()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    write_measurement(record_of(seed=0), tmp_path)
    write_measurement(record_of(benchmark="mlp-adult"), tmp_path)
    found = read_measurements(tmp_path)
    assert [(record.benchmark, record.seed) for record in found] == [
        ("mlp-adult", 1), ("mlp-digits", 0), ("mlp-digits", 1),
    ]  # fmt: skip
    assert read_measurements(tmp_path / "mlp-digits" / "nothing") == []


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (({"model": "a"}, {"model": "b", "zeros": 1}), "same keys"),
        ((), "same keys"),
        (({"model": "a", "zeros": float("nan")},), "JSON compliant"),
        (({"model": "a", "zeros": float("inf")},), "JSON compliant"),
    ],
)
def test_rows_that_nobody_could_read_are_refused_and_the_old_record_kept(tmp_path, rows, error):
    path = write_measurement(record_of(), tmp_path)
    with pytest.raises(ValueError, match=error):
        write_measurement(record_of(rows=rows), tmp_path)
    assert read_measurement(path) == record_of()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_foreign_files_are_named(tmp_path):
    path = tmp_path / "x-seed0.json"
    for text in ("{", "[]", '{"schema_version": 1}', '{"schema_version": 2}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"x-seed0\.json is not"):
            read_measurement(path)
    raw = json.loads(write_measurement(record_of(), tmp_path).read_text())
    path.write_text(json.dumps({**raw, "colour": "blue"}))
    with pytest.raises(ValueError, match=r"unknown \['colour'\]"):
        read_measurement(path)
