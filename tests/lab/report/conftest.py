import copy

import pytest
from lgelu_lab.measurements.records import MeasurementRecord

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


@pytest.fixture
def summaries():
    """What a record says of its networks; a fresh copy."""
    return copy.deepcopy(SUMMARIES)
