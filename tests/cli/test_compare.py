"""hf-lgelu compare, end to end on a small trained MLP."""

import json
import shutil

import pytest

from hf_lgelu.models.checkpoint import load_checkpoint


def accuracy(folder, test_rows):
    features, labels = test_rows
    return (load_checkpoint(folder)(features).logits.argmax(-1) == labels).double().mean().item()


def cells(said, line):
    return said[said.index("test.csv:\n") :].splitlines()[1 + line].split()


def test_the_table_of_two_checkpoints(place, converted, test_rows, call):
    status, said, errors = call("compare", place / "gelu", converted, "--data", place / "test.csv", "--disable_tqdm")
    assert (status, errors) == (0, "")
    assert said.startswith("Measuring both networks in float32: score and distance on 100 inputs, then time ...\n")
    for line, (name, folder) in enumerate((("original", place / "gelu"), ("converted", converted)), start=1):
        assert cells(said, line)[:3] == [name, "float32", f"{accuracy(folder, test_rows):.4f}"]
    assert "int8" not in said
    assert "was fitted to" not in said


def test_inputs_that_were_fitted_are_named(place, converted, tmp_path, call):
    said = call(
        "compare", place / "gelu", converted, "--data", place / "rows.csv", "--max_samples", "40", "--disable_tqdm"
    )[1]
    assert "On 40 inputs" in said
    assert "The conversion was fitted to inputs of this set" in said
    words = ("export", converted, "--to", "int8", "--allow_worse", "--data", place / "rows.csv", "--disable_tqdm")
    said = call(*words, "--output_dir", tmp_path / "int8")[1]
    assert "The conversion was fitted to inputs of this set" in said


def test_the_outputs_that_counted_in_the_conversion_count_again(place, converted, tmp_path, call):
    folder = shutil.copytree(converted, tmp_path / "relu")
    report = json.loads((folder / "report.json").read_text())
    report["report"]["config"]["outputs"] = ["boxes"]
    (folder / "report.json").write_text(json.dumps(report))
    data = ("--data", place / "test.csv", "--disable_tqdm")
    for words in (
        ("compare", place / "gelu", folder),
        ("export", folder, "--to", "int8", "--output_dir", tmp_path / "8"),
    ):
        status, _, errors = call(*words, *data)
        assert status == 1
        assert "are logits, got ['boxes']" in errors


@pytest.mark.slow
def test_int8_beside_float32(place, converted, call):
    pytest.importorskip("onnxruntime")
    words = ("compare", place / "gelu", converted, "--data", place / "test.csv", "--int8", "--disable_tqdm")
    status, said, errors = call(*words)
    assert (status, errors) == (0, "")
    assert [cells(said, line)[:2] for line in (3, 4)] == [["original", "int8"], ["converted", "int8"]]
    assert "25 other inputs gave the ranges" in said
