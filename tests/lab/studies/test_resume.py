"""A run of a study that is interrupted, and goes on."""

import shutil
from pathlib import Path

import pytest
from lgelu_lab.studies import resume
from lgelu_lab.studies.experiments import STUDIES, Experiment
from lgelu_lab.studies.folder import FolderBusyError, sole_writer
from lgelu_lab.studies.records import read_record
from lgelu_lab.studies.study import run_study
from transformers import TrainerCallback

from hf_lgelu.training.trainer import LambdaGELUTrainer

RECORDS = Path(__file__).parents[3] / "model_cards" / "records"
ARGUMENTS = {
    "benchmark": "mlp-digits", "num_train_epochs": 4, "max_train_samples": 128, "use_cpu": True, "harden": True,
    "save_final_model": False, "seed": 1,
}  # fmt: skip


class _PowerCut(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **kwargs):
        if int(state.epoch or 0) == 2:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A folder whose run was interrupted at the start of its third epoch."""
    original = LambdaGELUTrainer.__init__

    def with_power_cut(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.add_callback(_PowerCut())

    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LambdaGELUTrainer, "__init__", with_power_cut)
        with pytest.raises(KeyboardInterrupt):
            resume.train_resumably({**ARGUMENTS, "output_dir": str(folder)})
    return folder


@pytest.fixture
def cut_off(interrupted, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(interrupted, tmp_path / "cut"))


def test_an_interrupted_run_ends_like_one_that_was_not(cut_off, tmp_path):
    assert [path.name for path in cut_off.glob("checkpoint-*")] == ["checkpoint-4"]
    resumed = resume.train_resumably({**ARGUMENTS, "output_dir": str(cut_off)})
    whole = resume.train_resumably({**ARGUMENTS, "output_dir": str(tmp_path / "whole")})
    assert [epoch.epoch for epoch in resumed.epochs] == [1, 2, 3, 4]
    assert resumed.epochs == whole.epochs
    assert resumed.initial_hardness == whole.initial_hardness
    assert {path.name for path in cut_off.iterdir()} == {"record.json"}
    assert read_record(cut_off) == resumed


@pytest.mark.parametrize("settings", [None, "", "{", "[]"])
def test_checkpoints_of_an_unknown_run_are_not_gone_on_from(cut_off, settings):
    (cut_off / "settings.json").unlink()
    if settings is not None:
        (cut_off / "settings.json").write_text(settings)
    with pytest.raises(ValueError, match=r"settings\.json.*remove"):
        resume.train_resumably({**ARGUMENTS, "output_dir": str(cut_off)})


def test_two_studies_never_train_one_run_at_once(tmp_path, capsys):
    experiment = Experiment("run", {**ARGUMENTS, "num_train_epochs": 4})
    with sole_writer(tmp_path / "run"):
        assert run_study([experiment], tmp_path) == ["run"]
        with pytest.raises(FolderBusyError, match=r"another process.*run"):
            resume.train_resumably({**experiment.arguments, "output_dir": str(tmp_path / "run")})
    assert "another process is writing" in capsys.readouterr().err
    assert list((tmp_path / "run").iterdir()) == []
    assert run_study([experiment], tmp_path) == []


@pytest.mark.parametrize(
    ("study", "benchmark", "given"),
    [
        ("substitution", "mlp-adult", {}),
        ("grid", "mlp-fmnist", {"num_train_epochs": 10.0}),
    ],
)
def test_committed_records_are_those_of_their_study(study, benchmark, given, tmp_path):
    for experiment in STUDIES[study].build([benchmark], [0])[:2]:
        arguments = {**experiment.arguments, **given, "data_dir": str(tmp_path), "output_dir": str(tmp_path)}
        resume.check_same_run(RECORDS / experiment.name, arguments)
        with pytest.raises(ValueError, match=r"data_seed.*None.*3"):
            resume.check_same_run(RECORDS / experiment.name, {**arguments, "data_seed": 3})
