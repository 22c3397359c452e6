"""scripts/bench_convert.py: what is measured, how it is shown, and that a rerun measures only what is not there."""

import csv
import dataclasses
import json

import bench_convert
import pandas as pd
import pytest
import torch
from lgelu_lab import conversion_bench, detector_conversion, gated_conversion
from lgelu_lab.conversion_bench import CASES, NAMED, TIME_COLUMNS, Case, draw_figure, markdown_table
from lgelu_lab.measurements.int8 import PRECISIONS
from lgelu_lab.rows_file import RowsFile
from torch import nn

from hf_lgelu.models.sites import find_sites


def row(name, seconds, **given):
    case = CASES[name]
    values = {"case": name, "rows": case.rows, "width": case.width, "threads": 2, "seconds": seconds, "peak_gib": 1.5}
    return dict.fromkeys(TIME_COLUMNS) | values | given


@pytest.fixture
def small(monkeypatch):
    """One case that takes no time, and no other before it."""

    def build():
        return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)), 3 * torch.randn(128, 3)

    case = Case("small", 128, 128, 8, build)
    monkeypatch.setattr(conversion_bench, "CASES", {"small": case, "rows-2048": case})


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["bench_convert.py", *arguments])
    return bench_convert.main()


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


def test_what_we_want_to_stay_within_is_measured():
    assert {name: CASES[name].target_seconds for name in NAMED} == {
        "mlp-4x256": 2.0,
        "gpt2-4x128": 5.0,
        "gpt2-124m": 600.0,
        "resnet18-cifar": 60.0,
    }


def test_a_conversion_is_timed_in_this_process(small, monkeypatch, capsys):
    assert run(monkeypatch, "--measure_here", "small", "--threads", "1") == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (measured["case"], measured["threads"], measured["outcome"]) == ("small", 1, "converted")
    assert tuple(measured) == TIME_COLUMNS
    assert 0 < measured["seconds"] < 60
    assert 0.05 < measured["peak_gib"] < 64


def test_a_rerun_measures_only_what_is_not_there(monkeypatch, tmp_path, capsys):
    asked = []

    def measured(name, threads):
        asked.append((name, threads))
        return row(name, 1.0, threads=threads, outcome="converted")

    monkeypatch.setattr(bench_convert, "measure_apart", measured)
    path = tmp_path / "new" / "rows.csv"
    assert run(monkeypatch, "--csv", str(path)) == 0
    assert asked == [(name, 2) for name in NAMED]
    assert run(monkeypatch, "--csv", str(path), "--cases", "mlp-4x256", "rows-2048") == 0
    assert run(monkeypatch, "--csv", str(path), "--cases", "mlp-4x256", "--threads", "1") == 0
    assert asked[len(NAMED) :] == [("rows-2048", 2), ("mlp-4x256", 1)]
    with path.open(newline="") as file:
        assert [entry["case"] for entry in csv.DictReader(file)] == [*NAMED, "rows-2048", "mlp-4x256"]
    capsys.readouterr()
    assert run(monkeypatch, "--csv", str(path), "--cases", "none") == 1
    assert "unknown case none; accepted: mlp-4x256" in capsys.readouterr().err


def test_the_table_has_the_named_networks_first_with_what_they_should_stay_within():
    lines = markdown_table(pd.DataFrame([row("width-128", 0.25), row("gpt2-124m", 300.0, peak_gib=5.0)])).splitlines()
    assert lines[2] == "| gpt2-124m | 16,384 | 3,072 | 2 | 300.00 | 5.00 GiB | ≤ 600 s, 6 GiB |"
    assert lines[3] == "| width-128 | 4,096 | 128 | 2 | 0.25 | 1.50 GiB | – |"


def test_the_figure_needs_two_points_of_each_sweep(tmp_path):
    rows = [row(name, 0.001 * case.rows) for name, case in CASES.items() if case.sweep == "rows"]
    with pytest.raises(ValueError, match="0 points over width"):
        draw_figure(pd.DataFrame(rows), tmp_path / "none.png")
    rows += [row(name, 1e-9 * case.width**3) for name, case in CASES.items() if case.sweep == "width"]
    draw_figure(pd.DataFrame(rows), tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 10_000


@pytest.fixture
def gated(monkeypatch):
    """Gated networks that take no time; what was measured, as (activation, seed, sequences judged on)."""
    asked = []

    class Sequences(list):
        eval = property(lambda self: self)

    def load(data_dir, max_eval_samples):
        return None, Sequences(range(max_eval_samples or 2509))

    def measured(activation, seed, benchmark, data):
        asked.append((activation, seed, len(data.eval)))
        given = {"activation": activation, "seed": seed, "eval_sequences": len(data.eval)}
        return dict.fromkeys(gated_conversion.COLUMNS, 1.0) | given

    monkeypatch.setattr(gated_conversion, "load_texts", load)
    monkeypatch.setattr(gated_conversion, "measure_gated", measured)
    return asked


def test_gated_networks_judged_on_other_sequences_are_other_rows(gated, monkeypatch, tmp_path):
    path = tmp_path / "rows.csv"
    command = ("--csv", str(path), "--gated", "silu", "--max_eval_samples", "300")
    assert run(monkeypatch, *command, "--seeds", "0") == 0
    assert run(monkeypatch, *command, "--seeds", "0", "1") == 0
    assert gated == [("silu", 0, 300), ("silu", 1, 300)]
    assert run(monkeypatch, *command[:-2], "--seeds", "0") == 0
    assert gated[2:] == [("silu", 0, 2509)]


def test_the_validation_sequences_are_limited_where_they_are_read(monkeypatch):
    asked, name = [], "llama-wikitext2"
    benchmark = dataclasses.replace(
        gated_conversion.BENCHMARKS[name], load=lambda options, of_model: asked.append(options)
    )
    monkeypatch.setitem(gated_conversion.BENCHMARKS, name, benchmark)
    gated_conversion.load_texts("somewhere", 300)
    assert (asked[0].data_dir, asked[0].max_eval_samples, asked[0].max_train_samples) == ("somewhere", 300, None)


def test_a_detector_that_was_stopped_goes_on_where_it_was(monkeypatch, tmp_path):
    """Rows are written one by one; a rerun makes those that are missing."""
    path, asked = tmp_path / "rows.csv", []
    key = [(method, precision) for method in detector_conversion.methods() for precision in PRECISIONS]

    def measured(seed, there):
        for method, precision in key:
            if (method, precision) not in there:
                asked.append((method, precision))
                given = {"method": method, "precision": precision, "seed": seed}
                yield dict.fromkeys(detector_conversion.COLUMNS) | given
                if len(asked) == 5:
                    raise RuntimeError("stopped")

    monkeypatch.setattr(detector_conversion, "measure_detector", measured)
    command = ("--csv", str(path), "--detector", "--seeds", "3")
    assert run(monkeypatch, *command) == 1
    assert run(monkeypatch, *command) == 0
    assert asked == key
    assert run(monkeypatch, *command) == 0
    assert asked == key


@pytest.mark.parametrize("other", [("--gated", "silu"), ("--detector",), ("--table",), ("--figure", "none.png")])
def test_a_file_of_other_rows_is_refused_before_anything_is_measured(other, gated, monkeypatch, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    columns = gated_conversion.COLUMNS if other[0].startswith(("--table", "--figure")) else TIME_COLUMNS
    RowsFile(path, columns, columns[:1]).append(dict.fromkeys(columns, 1))
    monkeypatch.setattr(detector_conversion, "measure_detector", lambda *_, **__: pytest.fail("measured"))
    assert run(monkeypatch, "--csv", str(path), *other) == 1
    told = capsys.readouterr().err
    assert f"has other columns ({', '.join(columns)}) than " in told
    assert "name another file with --csv" in told
    assert gated == []


@pytest.mark.parametrize(
    ("name", "columns"),
    [("time", TIME_COLUMNS), ("gated", gated_conversion.COLUMNS), ("detector", detector_conversion.COLUMNS)],
)
def test_the_committed_rows_can_be_added_to(name, columns):
    assert len(RowsFile(f"docs/convert/{name}.csv", columns, columns[:1]).frame()) > 2


def test_a_row_with_other_columns_is_no_row_of_the_file(tmp_path):
    with pytest.raises(ValueError, match="have case, seconds, got case"):
        RowsFile(tmp_path / "rows.csv", ("case", "seconds"), ("case",)).append({"case": "a"})
    assert not (tmp_path / "rows.csv").exists()
