"""Rows of a measurement and the file that a rerun continues."""

import csv

import pytest
import torch
from bench_rows import PROVENANCE, cells_of, measured
from lgelu_lab.kernel_bench import results


def test_rows_have_all_columns_and_a_rerun_measures_nothing(tmp_path):
    path = tmp_path / "a" / "bench.csv"
    rows = measured(path)
    assert [(row["provider"], row["mode"]) for row in rows] == [
        *(("gelu", "forward"), ("relu", "forward"), ("gelu", "both"), ("relu", "both"))
    ]
    with path.open(encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    assert tuple(written[0]) == results.COLUMNS
    assert len(written) == 4
    relu = written[3]
    assert (relu["size"], relu["elements"], relu["device"], relu["commit"], relu["rounds"]) == (
        "64",
        "64",
        "abacus",
        "abc",
        "2",
    )
    assert (relu["saved_bytes_per_element"], relu["peak_bytes"], relu["peak_ratio"]) == ("4", "512", "1")
    moved = 5 * 64 * 4
    assert float(relu["gigabytes_per_second"]) == pytest.approx(
        moved / float(relu["milliseconds_median"]) / 1e6, rel=1e-4
    )
    assert [cells["ratio_median"] for cells in written if cells["provider"] == "gelu"] == ["1", "1"]
    assert measured(path) == []
    assert path.read_text(encoding="utf-8").count("\n") == 5


def test_a_rerun_adds_what_is_missing(tmp_path):
    path = tmp_path / "bench.csv"
    measured(path, modes=("forward",))
    more = measured(path, names=("relu", "lambda_gelu:eager"), hardness=(1.0, 20.0), modes=("forward",))
    assert [(row["provider"], row["hardness"], row["kernel"]) for row in more] == [
        *(("lambda_gelu:eager", "1", "eager"), ("lambda_gelu:eager", "20", "eager"))
    ]
    other = PROVENANCE | {"commit": "def"}
    assert len(measured(path, modes=("forward",), provenance=other)) == 2  # of another commit


def test_provenance_names_the_software():
    found = results.find_provenance("cpu")
    assert found["torch"] == torch.__version__.partition("+")[0]
    assert all(found[name] for name in ("device", "commit", "hf_lgelu"))


@pytest.mark.parametrize("column", ["kernel", "size", "memory_format", "dtype", "threads", "allocator", "clock"])
def test_a_row_measured_otherwise_is_not_the_same(tmp_path, column):
    results.results_file(tmp_path / "bench.csv", PROVENANCE).append(cells_of())
    reread = results.results_file(tmp_path / "bench.csv", PROVENANCE)
    assert cells_of() in reread
    assert cells_of(**{column: "another"}) not in reread


@pytest.fixture(scope="module")
def file_of_two(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "bench.csv"
    assert len(measured(path, modes=("forward",))) == 2
    assert measured(path, modes=("forward",)) == []
    return path


@pytest.mark.parametrize("column", results.PROVENANCE)
def test_a_row_of_another_machine_or_software_is_measured_again(file_of_two, monkeypatch, column):
    """Neither of its rows counts as measured, and what does not count is measured (above)."""
    cells = list(csv.DictReader(file_of_two.open(encoding="utf-8", newline="")))
    rows = [{name: value for name, value in row.items() if name not in results.PROVENANCE} for row in cells]
    same, other = (
        results.results_file(file_of_two, provenance) for provenance in (PROVENANCE, PROVENANCE | {column: "another"})
    )
    assert [row in same for row in rows] == [True, True]
    assert [row in other for row in rows] == [False, False]
