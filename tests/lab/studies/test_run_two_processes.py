"""Two processes with half the batch each do what one process does, but for the order of additions."""

import json

import pytest
import torch
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.studies.arguments import parse_mapping
from lgelu_lab.studies.records import read_record
from lgelu_lab.studies.run import run_benchmark
from safetensors.torch import load_file
from two_processes import run_in_two_processes

ARGUMENTS = {
    "benchmark": "mlp-digits", "activation": "lambda_gelu", "harden": True, "hardening_strategy": "steps",
    "max_train_samples": 640, "num_train_epochs": 1, "use_cpu": True, "disable_tqdm": True, "log_level": "error",
}  # fmt: skip
WORDS = [f"--{name}={value}" for name, value in ARGUMENTS.items()]
TRAIN = f"""
import sys
import train
sys.argv = ["train.py", *{WORDS}, f"--output_dir={{sys.argv[1]}}/two"]
assert train.main() == 0
"""


@pytest.mark.slow
def test_the_recipes_batch_is_divided_and_its_files_are_written_once(tmp_path):
    """640 rows are 10 batches of 64, or of 2 × 32."""
    (tmp_path / "train_once.py").write_text(TRAIN)
    run_in_two_processes(tmp_path / "train_once.py", tmp_path)
    record = read_record(tmp_path / "two")
    alone = run_benchmark(*parse_mapping({**ARGUMENTS, "output_dir": str(tmp_path / "one")}))
    assert (record.hardware["processes"], alone.hardware["processes"]) == (2, 1)
    assert record.config["train_batch_size"] == BENCHMARKS["mlp-digits"].defaults["per_device_train_batch_size"]
    assert record.config == alone.config
    assert record.data["eval_samples"] == 359  # odd, so the last batch is uneven
    assert (record.last.score, record.last.relu_score) == (alone.last.score, alone.last.relu_score)
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)  # rounding; weights move by hundredths
    assert json.loads((tmp_path / "two" / "relu" / "config.json").read_text())["hidden_act"] == "relu"
    assert list(record.weights) == ["model.safetensors", "relu/model.safetensors"]
