import copy
import dataclasses

import pandas
import pytest
from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.frames import read_frames
from lgelu_lab.report.markup import build_table
from lgelu_lab.report.write import ALL_TABLES

pandas.set_option("mode.string_storage", "python")  # of tables of a few rows, quicker than Arrow's

SUMMARIES = {
    "gelu": {"run": "g", "metric": "accuracy", "score": 0.75, "relu_score": 0.5, "target_hardness": None},
    "relu": {"run": "r", "metric": "accuracy", "score": 0.625, "relu_score": None, "target_hardness": None},
    "hardened": {"run": "h", "metric": "accuracy", "score": 0.875, "relu_score": 0.875, "target_hardness": 160.0},
}


def make_measurement(measurement, rows, *, seed=0, benchmark="mlp-digits", models=None, **fields):
    """A measurement's record with round numbers."""
    values = {
        "created": "2026-01-01T00:00:00+00:00",
        "seconds": 12.4,
        "settings": {"points": 4, "epsilons": [0.01, 0.5]},
        "models": copy.deepcopy(SUMMARIES) if models is None else models,
        "versions": {"torch": "1", "python": "3"},
        "hardware": {"cpu": "abacus", "cpu_cores": 2, "accelerators": [], "processes": 1, "threads_per_process": 1},
        **fields,
    }
    return MeasurementRecord(measurement=measurement, benchmark=benchmark, seed=seed, rows=tuple(rows), **values)


@pytest.fixture(scope="session")
def measurement_of():
    return make_measurement


@pytest.fixture(scope="session")
def data_of(record_of):
    """Records and measurements → the frames of a report; a downstream run stands in where there is no record."""

    def build(records=(), measurements=(), **options):
        name = "downstream/mlp-digits/gelu-seed0"
        records = list(records) or [record_of(benchmark="mlp-digits", name=name)]
        return read_frames(records, measurements, **options)

    return build


@pytest.fixture(scope="session")
def table_of(data_of):
    """A table by its key, from records and measurements, its rows as lists."""

    def build(key, records=(), measurements=(), **options):
        table = build_table(ALL_TABLES[key], data_of(records, measurements, **options))
        return dataclasses.replace(table, rows=[list(row) for row in table.rows])

    return build


@pytest.fixture(scope="session")
def relufied(record_of):
    """GELU for `switched` epochs, then ReLU."""

    def build(scores=(0.8, 0.9, 0.85), switched=1, **fields):
        relu = tuple(0.5 if number < switched else None for number in range(len(scores)))
        record = record_of(scores=scores, relu_scores=relu, **fields)
        record.config["relufication"] = True
        return record

    return build
