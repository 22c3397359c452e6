"""Rows of a measurement and the file that a rerun continues."""

import csv

from lgelu_lab.kernel_bench import measure, providers, results

PROVENANCE = dict(zip(results.PROVENANCE, ("abacus", "1", "", "2", "3", "abc"), strict=True))


def measured(path):
    """Rows of two rounds on a tiny input, by a stock allocator."""
    chosen = [providers.PROVIDERS[name] for name in (providers.REFERENCE, "relu")]
    bench = measure.Bench("cpu", 1, "stock", 2, 0.0, results.results_file(path, PROVENANCE))
    return list(measure.measure_operation("64", "float32", chosen, [2.0], ["forward", "both"], bench))


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
