"""A run of a study that is interrupted, and goes on."""

import pytest
from lgelu_lab.studies import resume
from lgelu_lab.studies.records import read_record
from transformers import TrainerCallback

from hf_lgelu.training.trainer import LambdaGELUTrainer

ARGUMENTS = {
    "benchmark": "mlp-digits", "num_train_epochs": 4, "max_train_samples": 128, "use_cpu": True, "harden": True,
    "save_final_model": False, "seed": 1,
}  # fmt: skip


class _PowerCut(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **kwargs):
        if int(state.epoch or 0) == 2:
            raise KeyboardInterrupt


@pytest.fixture
def cut_off(tmp_path, monkeypatch):
    """A folder whose run was interrupted at the start of its third epoch."""
    original = LambdaGELUTrainer.__init__

    def with_power_cut(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.add_callback(_PowerCut())

    folder = tmp_path / "cut"
    with monkeypatch.context() as patch:
        patch.setattr(LambdaGELUTrainer, "__init__", with_power_cut)
        with pytest.raises(KeyboardInterrupt):
            resume.train_resumably({**ARGUMENTS, "output_dir": str(folder)})
    return folder


def test_an_interrupted_run_ends_like_one_that_was_not(cut_off, tmp_path):
    assert [path.name for path in resume.checkpoints(cut_off)] == ["checkpoint-4"]
    resumed = resume.train_resumably({**ARGUMENTS, "output_dir": str(cut_off)})
    whole = resume.train_resumably({**ARGUMENTS, "output_dir": str(tmp_path / "whole")})
    assert [epoch.epoch for epoch in resumed.epochs] == [1, 2, 3, 4]
    assert resumed.epochs == whole.epochs
    assert resumed.initial_hardness == whole.initial_hardness
    assert [path.name for path in cut_off.iterdir()] == ["record.json"]
    assert read_record(cut_off) == resumed


def test_a_checkpoint_that_was_cut_off_is_not_used(cut_off):
    broken = cut_off / "checkpoint-6"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"half")
    assert resume.last_checkpoint(cut_off).name == "checkpoint-4"
    assert resume.train_resumably({**ARGUMENTS, "output_dir": str(cut_off)}).last.epoch == 4
    assert not broken.exists()


def test_an_interrupted_run_of_other_settings_is_refused(cut_off):
    with pytest.raises(ValueError, match=r"an interrupted run: learning_rate was 0\.05 and is now 0\.01"):
        resume.train_resumably({**ARGUMENTS, "learning_rate": 0.01, "output_dir": str(cut_off)})
    assert resume.last_checkpoint(cut_off) is not None


def test_rows_are_loaded_once_for_runs_on_the_same_data(tmp_path, monkeypatch):
    resume._kept_rows.cache_clear()
    for seed in (0, 1):
        resume.train_resumably(
            {**ARGUMENTS, "num_train_epochs": 1, "seed": seed, "output_dir": str(tmp_path / str(seed))}
        )
    assert (resume._kept_rows.cache_info().misses, resume._kept_rows.cache_info().hits) == (1, 1)
    other = {**ARGUMENTS, "num_train_epochs": 1, "max_train_samples": 64, "output_dir": str(tmp_path / "less")}
    assert resume.train_resumably(other).data["train_samples"] == 64
