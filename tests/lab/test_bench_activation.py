"""scripts/bench_activation.py as a command."""

import sys

import bench_activation


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["bench_activation.py", *words])
    monkeypatch.setattr(bench_activation, "restart_with", lambda settings: None)
    bench_activation.main()


SMALL = ("--hardness", "2", "--sizes", "64", "--modes", "both", "--dtypes", "float32", "--threads", "1")


def test_the_command_measures_and_says_each_row(tmp_path, monkeypatch, capsys):
    words = ("--csv", str(tmp_path / "bench.csv"), *SMALL)
    command(monkeypatch, *words, "--rounds", "1", "--providers", "relu", "lambda_gelu:eager")
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in said] == [
        f"both 64 contiguous float32 1 threads keep: {name}" for name in ("gelu", "lambda_gelu:eager λ=2", "relu")
    ]
