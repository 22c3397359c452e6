"""scripts/bench_convert.py: what is measured, and that a rerun measures only what is not there."""

import bench_convert
import pytest
import torch
from bench_convert import TIME_COLUMNS, Case
from lgelu_lab.rows_file import read_rows
from torch import nn


@pytest.fixture
def small(monkeypatch):
    """One case that takes no time, and no other before it."""

    def build():
        return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)), 3 * torch.randn(128, 3)

    case = Case(128, 128, 8, build)
    monkeypatch.setattr(bench_convert, "CASES", {"small": case})


def test_a_conversion_is_timed_in_this_process(small):
    measured = bench_convert.measure_here("small", 1)
    assert (measured["case"], measured["threads"], measured["outcome"]) == ("small", 1, "converted")
    assert tuple(measured) == TIME_COLUMNS
    assert 0 < measured["seconds"] < 60
    assert 0.05 < measured["peak_gib"] < 64
    assert 2 * measured["forward_seconds"] <= measured["least_seconds"] + 0.002  # both are rounded
    assert measured["least_seconds"] < measured["processor_seconds"]


def test_the_committed_rows_can_be_added_to():
    assert len(read_rows("docs/lab/convert/time.csv", TIME_COLUMNS)) > 2
