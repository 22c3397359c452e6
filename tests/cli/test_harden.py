"""scripts/harden.py end to end on a small trained MLP: every target, the card, what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from lgelu_lab.studies.arguments import parse_mapping
from lgelu_lab.studies.run import run_benchmark
from safetensors.torch import load_file

from hf_lgelu.cli import harden as module
from hf_lgelu.cli.harden import HardenArguments, harden
from hf_lgelu.export.targets import EXPORT_TARGETS, ExportOptions, check_target
from hf_lgelu.models.checkpoint import load_checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "harden.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A hardened run of two epochs on the digits, with its record."""
    folder = tmp_path_factory.mktemp("run")
    arguments = {
        "benchmark": "mlp-digits", "harden": True, "switch_fraction": 0.5, "num_train_epochs": 2, "seed": 5,
        "output_dir": str(folder), "disable_tqdm": True,
    }  # fmt: skip
    run_benchmark(*parse_mapping(arguments))
    return folder


@pytest.fixture(scope="module")
def soft(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soft")
    arguments = {"benchmark": "mlp-digits", "num_train_epochs": 1, "output_dir": str(folder), "disable_tqdm": True}
    run_benchmark(*parse_mapping(arguments))
    return folder


def said_by(arguments):
    lines = []
    report = harden(arguments, lines.append)
    return report, "\n".join(lines)


def test_relu_checkpoint_with_its_score_and_card(run, tmp_path):
    record = json.loads((run / "record.json").read_text())
    report, said = said_by(HardenArguments(str(run), str(tmp_path / "relu"), eval="mlp-digits"))
    score = record["epochs"][-1]["relu_score"]
    assert f"accuracy {score:.4f} exported" in said
    assert f"relu_accuracy {score:.4f} as it is" in said
    assert report.change.rows == 64
    assert {path.name for path in (tmp_path / "relu").iterdir()} == {
        "config.json", "model.safetensors", "README.md", "hardness.png",
    }  # fmt: skip
    card = ModelCard.load(tmp_path / "relu" / "README.md")
    assert f"| ReLU, the same weights (this model) | {score:.4f} |" in card.text
    assert card.data.license is None
    assert "one run with seed 5" in card.text.lower()
    ours, theirs = load_file(run / "relu" / "model.safetensors"), load_file(tmp_path / "relu" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_gelu_checkpoint_keeps_the_score(soft, tmp_path):
    score = json.loads((soft / "record.json").read_text())["epochs"][-1]["score"]
    report, said = said_by(HardenArguments(str(soft), str(tmp_path / "gelu"), to="gelu", eval="mlp-digits"))
    assert f"accuracy {score:.4f}" in said.splitlines()[-2]
    assert said.splitlines()[-2].endswith("exported")
    assert load_checkpoint(tmp_path / "gelu").config.hidden_act == "gelu"
    assert report.change.max_change < 1e-4
    assert (tmp_path / "gelu" / "README.md").exists()


def test_onnx_folder(soft, tmp_path):
    import onnxruntime

    said_by(HardenArguments(str(soft), str(tmp_path / "onnx"), to="onnx"))
    assert {path.name for path in (tmp_path / "onnx").iterdir()} == {"config.json", "model.onnx"}
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    features = torch.randn(7, 64)
    found = torch.from_numpy(session.run(None, {"features": features.numpy()})[0])
    torch.testing.assert_close(found, load_checkpoint(soft)(features).logits, rtol=1e-4, atol=1e-5)


def test_a_soft_model_is_refused_on_the_command_line_without_a_traceback(soft, tmp_path):
    shown = subprocess.run(
        [sys.executable, SCRIPT, "--model", soft, "--output_dir", tmp_path / "relu"], capture_output=True, text=True
    )
    assert shown.returncode == 1
    assert shown.stderr.strip().splitlines()[-1].startswith("ValueError: 4 of 4 gates are too soft for ReLU")
    assert "Traceback" not in shown.stderr
    assert list(tmp_path.iterdir()) == []
    said_by(HardenArguments(str(soft), str(tmp_path / "relu"), allow_soft=True))
    assert (tmp_path / "relu" / "config.json").exists()


def test_the_checkpoint_itself_is_not_overwritten(run):
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(ValueError, match="is the checkpoint itself"):
        harden(HardenArguments(str(run), f"{run}/.", overwrite=True))
    assert sorted(path.name for path in run.iterdir()) == before
    with pytest.raises(ValueError, match="has the checkpoint inside"):
        harden(HardenArguments(str(run), str(run.parent), overwrite=True))
    assert sorted(path.name for path in run.iterdir()) == before


def test_rows_of_another_benchmark_are_refused_by_its_name(run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_evaluation_data", lambda *_: object())
    monkeypatch.setattr(module, "_first_rows", lambda *_: {"features": torch.zeros(3, 5)})
    with pytest.raises(ValueError, match=r"rows of mlp-adult \(features \(3, 5\)\).*--eval the benchmark"):
        harden(HardenArguments(str(run), str(tmp_path / "relu"), eval="mlp-adult"))
    assert list(tmp_path.iterdir()) == []


def test_push_sends_the_folder_with_its_card(run, tmp_path, monkeypatch):
    pushed = []

    def push(folder, repo_id, *, private):
        pushed.append((sorted(path.name for path in folder.iterdir()), repo_id, private))
        return type("Commit", (), {"commit_url": "http://hub/commit/1"})

    monkeypatch.setattr(module, "push_to_hub", push)
    _, said = said_by(HardenArguments(str(run), str(tmp_path / "relu"), push_to_hub="me/digits", private=True))
    assert pushed == [(["README.md", "config.json", "hardness.png", "model.safetensors"], "me/digits", True)]
    assert said.endswith("Pushed: http://hub/commit/1")
    assert 'from_pretrained(MLPForClassification, "me/digits")' in (tmp_path / "relu" / "README.md").read_text()
    with pytest.raises(ValueError, match="an ONNX file with `hf upload`"):
        harden(HardenArguments(str(run), str(tmp_path / "onnx"), to="onnx", push_to_hub="me/digits"))
    assert not (tmp_path / "onnx").exists()


def test_every_target_is_a_choice_and_others_are_named():
    assert list(EXPORT_TARGETS) == ["relu", "gelu", "onnx"]
    for name, target in EXPORT_TARGETS.items():
        assert check_target(name) is target
        assert target.name == name
    with pytest.raises(ValueError, match="unknown export target 'tflite'; accepted: relu, gelu, onnx"):
        check_target("tflite")


def test_onnx_export_leaves_the_model_in_its_dtype(soft, tmp_path):
    model = load_checkpoint(soft).bfloat16()
    before = [parameter.dtype for parameter in model.parameters()]
    report = check_target("onnx").export(model, tmp_path / "onnx", ExportOptions())
    assert torch.bfloat16 in before
    assert [parameter.dtype for parameter in model.parameters()] == before
    assert report.path == tmp_path / "onnx" / "model.onnx"
    assert report.path.exists()
