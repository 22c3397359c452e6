"""hf-lgelu demo: the conversion half of the quickstart, on digits that the package carries."""

import csv
import shlex
from pathlib import Path

import pytest

from hf_lgelu.cli import demo
from hf_lgelu.cli.command import command_line
from hf_lgelu.models.checkpoint import load_checkpoint


def accuracies(said):
    """{network: accuracy on test.csv} of the report."""
    rows = [line.split() for line in said.partition("test.csv")[2].splitlines()]
    return {row[0]: float(row[-1]) for row in rows if row[:1] in (["original"], ["plain"], ["converted"])}


def test_the_demo_writes_networks_and_rows_for_the_calls_that_it_names(call, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_EPOCHS", 2)
    folder = tmp_path / "digits"
    status, said, errors = call("demo", "--output_dir", folder)
    assert status == 0, errors
    assert load_checkpoint(folder / "relu").config.hidden_act == "relu"
    sizes = {}
    for name in ("rows", "test"):
        with (folder / f"{name}.csv").open(newline="") as file:
            header, *lines = csv.reader(file)
            assert (len(header), header[-1]) == (65, "label")
            sizes[name] = len(lines)
    assert sizes == {"rows": 1347, "test": 450}
    *named, last = [shlex.split(line)[1:] for line in said.splitlines() if line.startswith("  hf-lgelu")]
    assert "YOUR_MODEL" in last
    for command, *words in named:
        arguments = command_line()[1][command].parse_args(words)
        given = [getattr(arguments, entry, None) for entry in ("model", "converted", "data", "evaluation")]
        assert all(Path(path).exists() for path in given if path is not None)
    assert call("demo", "--output_dir", folder)[2].endswith("is not empty; give another folder\n")


@pytest.mark.slow
def test_the_swap_costs_much_and_the_conversion_little(call, tmp_path):
    _, said, _ = call("demo", "--output_dir", tmp_path / "digits")
    found = accuracies(said)
    assert found["original"] > 0.9
    assert found["plain"] < found["original"] - 0.1
    assert found["converted"] > found["original"] - 0.02
