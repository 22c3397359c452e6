"""Two processes with half the batch each do what one process does, but for the order of additions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lgelu_lab.studies.arguments import parse_mapping
from lgelu_lab.studies.records import read_record
from lgelu_lab.studies.run import run_benchmark
from safetensors.torch import load_file
from tiny_language_model import CONTEXT, write_checkpoint, write_corpus

ROOT = Path(__file__).parents[3]
ARGUMENTS = {
    "activation": "lambda_gelu",
    "harden": True,
    "num_train_epochs": 4,
    "use_cpu": True,
    "disable_tqdm": True,
    "log_level": "error",
}


def in_two_processes(arguments, folder):
    """The record of scripts/train.py under torchrun."""
    words = [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in arguments.items()
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, str(ROOT / "scripts" / "train.py"), *words, f"--output_dir={folder}"]
    # torchrun alone starts two processes that do not know of each other.
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}",
    }
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return read_record(folder)


def both(arguments, tmp_path):
    """(record of one process, record of two), and their networks' tensors."""
    arguments = {**ARGUMENTS, **arguments}
    alone = run_benchmark(*parse_mapping({**arguments, "output_dir": str(tmp_path / "alone")}))
    together = in_two_processes(arguments, tmp_path / "together")
    assert (alone.hardware["processes"], together.hardware["processes"]) == (1, 2)
    differing = {name for name in alone.config if alone.config[name] != together.config[name]}
    assert differing == set(), "not the same run"
    networks = [load_file(tmp_path / name / "model.safetensors") for name in ("alone", "together")]
    return alone, together, *networks


def assert_same_networks(alone, together):
    """Weights move by hundredths in these runs, and rounding by 1e-7."""
    assert alone.keys() == together.keys()
    for name, tensor in alone.items():
        change = (tensor - together[name]).abs()
        if name.endswith("c_attn.bias"):
            # Softmax does not see the keys' bias: its gradient is rounding alone, and Adam makes steps of that.
            query, _, value = change.chunk(3)
            change = query.maximum(value)
        assert change.max() < 2e-6, name


def assert_same_epochs(alone, together, names, tolerance):
    assert len(alone.epochs) == len(together.epochs) == 4
    for one, two in zip(alone.epochs, together.epochs, strict=True):
        for name in names:
            assert getattr(two, name) == pytest.approx(getattr(one, name), rel=tolerance), name
        assert two.hardness == pytest.approx(one.hardness, rel=tolerance)


def test_the_mlp(tmp_path):
    """640 rows are 10 batches of 64, or of 2 × 32; 48 rows to evaluate are 6 batches of 8, or 3 of 2 × 8."""
    limits = {"max_train_samples": 640, "max_eval_samples": 48, "per_device_eval_batch_size": 8, "learning_rate": 0.5}
    alone, together, first, second = both({"benchmark": "mlp-digits", **limits}, tmp_path)
    assert_same_epochs(alone, together, ("score", "relu_score", "relu_unchanged_predictions"), 0)
    assert_same_epochs(alone, together, ("loss", "relu_loss"), 1e-5)
    assert_same_networks(first, second)
    assert alone.last.loss < 0.8 * alone.epochs[0].loss


def test_a_tiny_gpt2(tmp_path):
    """40 rows are 5 batches of 8, or of 2 × 4; 13 rows to evaluate in 2 × 4 leave 5, filled up with 3 that must not
    count. Trainer's mean loss of such a batch counts them, and perplexity does not."""
    arguments = {
        "benchmark": "gpt2-wikitext2",
        "data_dir": str(write_corpus(tmp_path, 60, 20)),
        "pretrained": str(write_checkpoint(tmp_path / "checkpoint")),
        "context_length": CONTEXT,
        "learning_rate": 3e-3,
        "max_train_samples": 40,
        "max_eval_samples": 13,
        "per_device_eval_batch_size": 4,
    }
    alone, together, first, second = both(arguments, tmp_path)
    assert (alone.data["train_samples"], alone.data["eval_samples"]) == (40, 13)
    assert_same_epochs(alone, together, ("score", "relu_score"), 1e-5)
    assert_same_networks(first, second)
    assert alone.last.score < 0.9 * alone.epochs[0].score
