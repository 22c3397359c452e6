"""A run by scripts/train.py in two processes."""

import json

import pytest
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.studies.records import read_record
from two_processes import run_in_two_processes

TRAIN = """
import sys
import train
words = ["--benchmark=mlp-digits", "--activation=lambda_gelu", "--harden", "--hardening_strategy=steps"]
words += ["--num_train_epochs=1", "--use_cpu", "--disable_tqdm=true", "--log_level=error"]
sys.argv = ["train.py", *words, f"--output_dir={sys.argv[1]}/run"]
assert train.main() == 0
"""


@pytest.mark.slow
def test_the_recipes_batch_is_divided_and_its_files_are_written_once(tmp_path):
    (tmp_path / "train_once.py").write_text(TRAIN)
    run_in_two_processes(tmp_path / "train_once.py", tmp_path)
    record = read_record(tmp_path / "run")
    assert record.hardware["processes"] == 2
    assert record.config["train_batch_size"] == BENCHMARKS["mlp-digits"].defaults["per_device_train_batch_size"]
    assert record.data["eval_samples"] == 359  # odd, so the last batch is uneven
    assert record.last.score * 359 == pytest.approx(round(record.last.score * 359), abs=1e-9)
    assert json.loads((tmp_path / "run" / "relu" / "config.json").read_text())["hidden_act"] == "relu"
    assert list(record.weights) == ["model.safetensors", "relu/model.safetensors"]
