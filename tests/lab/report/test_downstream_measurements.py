import pytest
from lgelu_lab.measurements.run import MEASUREMENTS
from lgelu_lab.report.downstream.inputs import read_downstream
from lgelu_lab.report.downstream.measurements import (
    MEASURED_ON,
    MODEL_LABELS,
    measured_benchmarks,
    of_measurement,
    over_seeds,
    rows_by,
)
from lgelu_lab.report.downstream.sections import PARTS
from lgelu_lab.studies.records import write_record


def test_every_measurement_has_a_part_and_the_benchmarks_that_it_can_be_made_on():
    assert set(PARTS) == set(MEASURED_ON)
    for name, measurement in MEASUREMENTS.items():
        assert set(MEASURED_ON[name]) == set(measurement.benchmarks), name
        assert set(measurement.models) <= MODEL_LABELS.keys()


def test_records_are_sorted_by_benchmark_and_seed_and_a_seed_twice_is_refused(measurement_of):
    places = [("mlp-fmnist", 1), ("elsewhere", 0), ("mlp-fmnist", 0), ("mlp-digits", 2)]
    records = [measurement_of("int8", [{"model": "gelu"}], benchmark=name, seed=seed) for name, seed in places]
    other = measurement_of("pruning", [{"model": "gelu"}], benchmark="mlp-adult")
    found = of_measurement([*records, other], "int8")
    assert [(name, [record.seed for record in seeds]) for name, seeds in found.items()] == [
        *(("mlp-digits", [2]), ("mlp-fmnist", [0, 1]), ("elsewhere", [0])),
    ]
    assert measured_benchmarks([*records, other]) == ["mlp-digits", "mlp-adult", "mlp-fmnist", "elsewhere"]
    with pytest.raises(ValueError, match=r"int8 of mlp-fmnist: more than one record of a seed \(0, 1, 1\)"):
        of_measurement([*records, records[0]], "int8")


def test_the_same_row_of_every_seed_stands_together(measurement_of):
    first = [{"model": "gelu", "epsilon": 0.1, "n": 1}, {"model": "relu", "epsilon": 0.1, "n": 2}]
    second = [{"model": "relu", "epsilon": 0.1, "n": 3}, {"model": "relu", "epsilon": 0.2, "n": 4}]
    records = [measurement_of("x", rows, seed=seed) for seed, rows in enumerate((first, second))]
    found = rows_by(records, "model", "epsilon")
    assert {key: [row["n"] for row in rows] for key, rows in found.items()} == {
        ("gelu", 0.1): [1], ("relu", 0.1): [2, 3], ("relu", 0.2): [4],
    }  # fmt: skip
    with pytest.raises(ValueError, match="a row of x of mlp-digits has no layer; it has model, epsilon, n"):
        rows_by(records, "model", "layer")
    with pytest.raises(ValueError, match="x of mlp-digits, seed 1: two rows with model = 'relu'"):
        rows_by(records, "model")


def test_mean_and_deviation_over_seeds_by_hand():
    assert over_seeds([1.0, 2.0, 6.0], lambda value: f"{value:.2f}") == "3.00 ± 2.65"  # √(4 + 1 + 9)/√2
    assert over_seeds([1.0], "{:g}".format) == "1"
    assert over_seeds([None, None], "{:g}".format) == over_seeds([], "{:g}".format) == "–"
    assert over_seeds([None, 1.0, 3.0], "{:.1f}".format) == "2.0 ± 1.4 (2 of 3 seeds)"


def test_the_folder_gives_measurements_and_the_runs_below_it_each_once(measurement_of, record_of, tmp_path):
    from lgelu_lab.measurements.records import write_measurement

    with pytest.raises(FileNotFoundError, match=r"scripts/downstream\.py"):
        read_downstream(tmp_path)
    write_measurement(measurement_of("int8", [{"model": "gelu"}]), tmp_path)
    there = record_of(name="downstream/mlp-digits/gelu-seed0")
    runs, measurements = read_downstream(tmp_path, [there])
    assert runs == [there]
    assert [record.measurement for record in measurements] == ["int8"]
    other = record_of(name="downstream/mlp-digits/relu-seed0", activation="relu")
    for record in (there, other):
        write_record(record, tmp_path / "runs" / record.name)
    assert read_downstream(tmp_path, [there])[0] == [there, other]
