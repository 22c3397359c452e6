"""scripts/bench_convert.py: what is measured, and that a rerun measures only what is not there."""

import bench_convert
import pytest
import torch
from bench_convert import CASES, TIME_COLUMNS, Case
from lgelu_lab.rows_file import read_rows
from torch import nn

from hf_lgelu.networks.sites import find_sites


@pytest.fixture
def small(monkeypatch):
    """One case that takes no time, and no other before it."""

    def build():
        return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)), 3 * torch.randn(128, 3)

    case = Case(128, 128, 8, build)
    monkeypatch.setattr(bench_convert, "CASES", {"small": case})


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "124m" not in name and case.rows < 2**14])
def test_the_named_width_is_that_of_the_widest_map_and_the_rows_are_the_inputs(name):
    case = CASES[name]
    model, inputs = case.build()
    assert len(find_sites(model)) > 0
    tensor = inputs if isinstance(inputs, torch.Tensor) else next(iter(inputs.values()))
    assert len(tensor) == case.units
    assert case.rows == (tensor.numel() if not tensor.is_floating_point() else len(tensor))
    widths = {parameter.flatten(1).shape[1] for parameter in model.parameters() if parameter.ndim > 1}
    if name != "resnet18-cifar":  # two convolutions side by side
        assert case.width in widths


def test_a_conversion_is_timed_in_this_process(small):
    measured = bench_convert.measure_here("small", 1)
    assert (measured["case"], measured["threads"], measured["outcome"]) == ("small", 1, "converted")
    assert tuple(measured) == TIME_COLUMNS
    assert 0 < measured["seconds"] < 60
    assert 0.05 < measured["peak_gib"] < 64


def test_the_committed_rows_can_be_added_to():
    assert len(read_rows("docs/lab/convert/time.csv", TIME_COLUMNS)) > 2
