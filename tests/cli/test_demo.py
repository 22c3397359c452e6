"""hf-lgelu demo: the conversion half of the quickstart, on digits that the package carries."""

import csv
import re
import shlex
from pathlib import Path

import pytest

from hf_lgelu.cli import demo
from hf_lgelu.cli.arguments import COMMANDS
from hf_lgelu.cli.command import parser_of
from hf_lgelu.models.checkpoint import load_checkpoint


def scores(said):
    rows = (re.fullmatch(r"(\S.*?)\s+(\d\.\d+)", line) for line in said.splitlines())
    return {row[1]: float(row[2]) for row in rows if row}


def test_the_demo_writes_networks_and_rows_for_the_calls_that_it_names(call, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_EPOCHS", 2)
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)  # the extra onnx is missing
    folder = tmp_path / "digits"
    status, said, errors = call("demo", "--output_dir", folder)
    assert (status, errors) == (0, "")
    found = scores(said)
    assert len(found) == 4
    assert "float32.onnx" not in said
    assert re.search(r"^That took \d+ s\. Converting", said, re.MULTILINE)  # the training before it
    assert "on 171 pictures of rows.csv that the conversion held out: KL" in said
    assert found["the same, saved and reloaded by plain torch"] == found["converted to ReLU"]
    assert load_checkpoint(folder).config.hidden_act == "relu"
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
        arguments = parser_of(COMMANDS[command]).parse_args(words)
        given = [getattr(arguments, entry, None) for entry in ("model", "converted", "data", "evaluation")]
        assert all(Path(path).exists() for path in given if path is not None)
    assert call("demo", "--output_dir", folder)[0] == 1


@pytest.mark.slow
def test_the_swap_costs_much_and_the_conversion_little(call, tmp_path):
    _, said, _ = call("demo", "--output_dir", tmp_path / "digits")
    original, swapped, converted, reloaded, int8 = scores(said).values()
    assert "float32.onnx and int8.onnx" in said
    assert original > 0.9
    assert swapped < original - 0.1
    assert min(converted, int8) > original - 0.02
    assert reloaded == converted
