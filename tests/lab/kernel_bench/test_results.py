"""Rows of a measurement and the file that a rerun continues."""

import csv

from bench_rows import measured
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
    assert [cells["ratio_median"] for cells in written if cells["provider"] == "gelu"] == ["1", "1"]
    assert measured(path) == []
    assert path.read_text(encoding="utf-8").count("\n") == 5
