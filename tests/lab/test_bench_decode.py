"""scripts/bench_decode.py: both ways give the same tokens at the share of units that was asked for."""

import csv

import bench_decode
import pytest
from lgelu_lab.rows_file import read_rows


def test_rows_of_a_small_network(monkeypatch, tmp_path):
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(
        "sys.argv", ["bench_decode.py", "--csv", str(path), "--small", "--threads", "1", "--rounds", "2"]
    )
    bench_decode.main()
    bench_decode.main()  # measures nothing anew
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["live"] for row in rows] == ["1.0", "0.37", "0.2"]
    for row in rows:
        assert row["same_tokens"] == "True"
        assert float(row["live_while_decoding"]) == pytest.approx(float(row["live"]), abs=0.1)
        assert float(row["ratio_median"]) > 0


def test_the_committed_rows_can_be_added_to():
    rows = read_rows("docs/lab/speed/decode.csv", bench_decode.COLUMNS)
    assert set(rows["same_tokens"]) == {"True"}
