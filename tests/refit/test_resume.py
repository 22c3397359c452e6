"""Conversions that were killed go on from their last layer, to the same bits; other work is refused."""

import os
from pathlib import Path

import pytest
import torch
from fresh_process import run_fresh
from full_disk import full_disk
from resume_run import mlp, rows
from small_networks import convert_with
from torch import nn

from hf_lgelu.files import hold
from hf_lgelu.refit import layerwise
from hf_lgelu.refit.config import EFFORTS
from hf_lgelu.refit.resume import forget_work


@pytest.mark.slow
def test_a_killed_conversion_goes_on_to_the_same_bits(tmp_path):
    traced = Path(__file__).with_name("resume_run.py")
    result = run_fresh(traced, tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    # What was being written is lost; of the rungs nothing was left but the last one.
    assert result.stdout.splitlines() == [
        "while-writing 2 True 0",
        "ladder 0 True 0",
        "convolutions 1 True 0",
    ]


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_go_on_to_the_same_bits(tmp_path):
    result = run_fresh(Path(__file__).with_name("resume_two_run.py"), tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    lost = "RuntimeError: the 2 processes have lost each other"
    differ = "ValueError: checkpoint_dir: the processes do not see the same files in"
    for line, said in zip(
        result.stdout.splitlines(),
        # The second is killed; one alone goes on; a folder is not shared; the first is killed; they go on.
        [lost, "SIGKILL", "ValueError: checkpoint_dir: ", differ, differ, "SIGKILL", lost, "1 True", "1 True"],
        strict=True,
    ):
        assert line.startswith(said)
    assert "or of another number of processes than 1; give another folder" in result.stdout


def test_an_interrupted_conversion_goes_on_behind_its_last_layer_to_the_same_bits(tmp_path, monkeypatch):
    whole = convert_with(mlp(), rows())
    fit, fitted = layerwise.fit_ridge, []

    def interrupted(*given, **options):
        fitted.append(1)
        if len(fitted) == 3:
            raise KeyboardInterrupt
        return fit(*given, **options)

    monkeypatch.setattr(layerwise, "fit_ridge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_with(mlp(), rows(), checkpoint_dir=tmp_path / "work")
    again = convert_with(mlp(), rows(), checkpoint_dir=tmp_path / "work")
    assert len(fitted) == 3 + len(whole.report.layers) - 2
    assert again.report.layers == whole.report.layers
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).eval()


def test_another_conversions_folder_is_refused(tmp_path):
    model, rows, folder = net(), torch.randn(200, 4), tmp_path / "work"
    first = convert_with(model, rows, checkpoint_dir=folder)
    assert {path.name for path in folder.iterdir()} >= {"conversion.txt", "refit-00000.safetensors"}
    again = convert_with(model, rows.flip(0), checkpoint_dir=folder, effort="place", max_kl=None)
    assert again.report.steps[0].distance == first.report.steps[0].distance  # the same rows, and a rung more
    for other, data, options in (
        (net(1), rows, {}),
        (model, rows[1:], {}),
        (model, rows, {"target": "relu6"}),
        (nn.Sequential(model[0], nn.SiLU(), model[2]), rows, {}),
    ):
        with pytest.raises(ValueError, match="another model, on other inputs or with other arguments"):
            convert_with(other, data, checkpoint_dir=folder, **options)
    written = (folder / "refit-00000.safetensors").read_bytes()
    for damaged in (written[:100], written[:-1] + bytes([written[-1] ^ 1])):
        (folder / "refit-00000.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"refit-00000.safetensors is damaged; delete it"):
            convert_with(model, rows, checkpoint_dir=folder)
    lock = hold(folder / "lock")
    with pytest.raises(BlockingIOError, match="another process works in"):
        convert_with(model, rows, checkpoint_dir=folder)
    os.close(lock)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / ".note").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for wrong, said in (("notes", "holds something else"), ("file", "File exists")):
        with pytest.raises((ValueError, FileExistsError), match=said):
            convert_with(model, rows, checkpoint_dir=tmp_path / wrong)
        forget_work(tmp_path / wrong)
    forget_work(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "notes"]
    assert (tmp_path / "notes" / ".note").read_text() == "mine"


def test_a_folder_whose_mark_was_never_whole_is_taken_up(tmp_path):
    model, rows, folder = net(), torch.randn(200, 4), tmp_path / "work"
    (folder / ".conversion.txt-abc.hf_lgelu").mkdir(parents=True)  # as a process leaves it that is killed there
    (folder / "lock").touch()
    convert_with(model, rows, checkpoint_dir=folder)
    assert {path.name for path in folder.iterdir()} >= {"conversion.txt", "refit-00000.safetensors"}


@pytest.mark.parametrize("name", ["", "conversion.new", "lock", "conversion.txt", "refit-00000.safetensors"])
def test_nothing_is_written_through_a_link_in_the_folder(name, tmp_path):
    model, rows, folder, victim = net(), torch.randn(200, 4), tmp_path / "work", tmp_path / "victim"
    if name:
        convert_with(model, rows, checkpoint_dir=folder)
        (folder / name).unlink(missing_ok=True)
        victim.write_text("precious")
    else:
        victim.mkdir()
    (folder / name).symlink_to(victim)
    before = sorted(path.name for path in folder.iterdir())
    if name == "conversion.new":  # which is no name of ours
        convert_with(model, rows, checkpoint_dir=folder)
    else:
        with pytest.raises((OSError, ValueError)):
            convert_with(model, rows, checkpoint_dir=folder)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert not list(victim.iterdir()) if victim.is_dir() else victim.read_text() == "precious"


def test_a_disk_that_fills_up_is_told_as_such(tmp_path):
    model = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 64)).eval()  # 8 KiB of weights in its one layer
    with full_disk(), pytest.raises(OSError, match=r"File too large|No space left"):
        convert_with(model, torch.randn(200, 4), checkpoint_dir=tmp_path / "work")


def test_distillation_of_another_rung_is_not_taken_up(tmp_path):
    model, rows, folder = net(), torch.randn(200, 4), tmp_path / "work"
    options = {"effort": "distill", "distill_steps": 4}
    first = convert_with(model, rows, checkpoint_dir=folder, **options)
    best = [step.effort for step in first.report.steps if step.is_kept and step.effort != "distill"][-1]
    other = "refit" if best != "refit" else "place"
    scores = iter([1.0, *(1.0 if effort == other else 0.5 for effort in EFFORTS)] * 2)
    options["metric"] = lambda network: next(scores)  # another rung is the best by this one
    again = convert_with(model, rows, checkpoint_dir=folder, **options)
    alone = convert_with(model, rows, **options)
    assert [step.distance for step in again.report.steps] == [step.distance for step in alone.report.steps]
