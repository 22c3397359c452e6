"""Rows of networks in programs of others, with stand-ins for these."""

import csv
import sys

import bench_runtimes
import pytest


def test_both_networks_get_a_row_in_every_program_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_runtimes, "_openvino", lambda images, network: lambda x: network(x).roll(1, 1))
    monkeypatch.setattr(bench_runtimes, "_coreml", lambda image, network: None)
    monkeypatch.setattr(bench_runtimes, "version", lambda name: "1")
    monkeypatch.setattr(bench_runtimes, "_ROUNDS", 1)
    file = tmp_path / "rows.csv"
    for made in (("original",), ("original", "refit")):
        line = ["bench_runtimes.py", "--network", "digits", "--csv", str(file), "--made", *made]
        monkeypatch.setattr(sys, "argv", line)
        assert bench_runtimes.main() == 0
    rows = {(row["made"], row["program"]): row for row in csv.DictReader(file.open())}
    assert len(rows) == capsys.readouterr().out.count("\n") == 6
    for made in ("original", "refit"):
        right, wrong, refused = (rows[made, name]["accuracy"] for name in ("torch", "openvino", "coremltools"))
        assert float(right) == pytest.approx(0.964, abs=0.01)
        assert float(wrong) < 0.05
        assert refused == ""
        assert float(rows[made, "torch"]["ms_of_64"]) > 0
