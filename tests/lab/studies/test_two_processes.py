"""Two processes with half the batch each do what one process does, but for the order of additions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.benchmarks.wikitext import train_tokenizer
from lgelu_lab.studies.arguments import parse_mapping
from lgelu_lab.studies.records import read_record
from lgelu_lab.studies.run import run_benchmark
from safetensors.torch import load_file
from tiny_language_model import CONTEXT, write_checkpoint, write_corpus
from two_processes import run_in_two_processes

pytestmark = pytest.mark.slow  # three runs in processes of their own
ROOT = Path(__file__).parents[3]
ARGUMENTS = {
    "activation": "lambda_gelu",
    "harden": True,
    "num_train_epochs": 4,
    "use_cpu": True,
    "disable_tqdm": True,
    "log_level": "error",
}
TRAIN_EACH = (
    "import json, os, sys\n"
    "lines = sys.argv[1] + '/lines.json'\n"
    "import train\n"
    "for words in json.load(open(lines)):\n"
    "    sys.argv = ['train.py', *words]\n"
    "    assert train.main() == 0\n"
    "from lgelu_lab.benchmarks.wikitext import train_tokenizer\n"
    "vocabulary = train_tokenizer(json.load(open(lines + '.texts')), 300, 8).get_vocab()\n"
    "json.dump(vocabulary, open(lines + '.vocabulary' + os.environ['RANK'], 'w'))\n"
)
# With ties between pairs; the hashes of the library of tokenizers differ from process to process.
TEXTS = [" ".join(chr(97 + i) + chr(97 + i * 7 % 26) + chr(97 + i * 3 % 26) for i in range(26))] * 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: (arguments, folder)} of runs that scripts/train.py made, one after the other, in one launch of two."""
    folder = tmp_path_factory.mktemp("runs")
    limits = {"max_train_samples": 640, "max_eval_samples": 48, "per_device_eval_batch_size": 8, "learning_rate": 0.5}
    of_text = {
        "data_dir": str(write_corpus(folder, 60, 20)),
        "pretrained": str(write_checkpoint(folder / "checkpoint")),
        "context_length": CONTEXT,
        "learning_rate": 3e-3,
        "max_train_samples": 40,
        "max_eval_samples": 13,
        "per_device_eval_batch_size": 4,
    }
    made = {
        "mlp": {**ARGUMENTS, "benchmark": "mlp-digits", **limits},
        "gpt2": {**ARGUMENTS, "benchmark": "gpt2-wikitext2", **of_text},
        "recipe": {**ARGUMENTS, "benchmark": "mlp-digits", "num_train_epochs": 1, "hardening_strategy": "steps"},
    }
    lines = [_words({**arguments, "output_dir": folder / name}) for name, arguments in made.items()]
    run_in_two_processes(_train_each(folder, lines), folder)
    return {name: (arguments, folder / name) for name, arguments in made.items()}


def _words(arguments):
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in arguments.items()}
    return [f"--{name}={text}" for name, text in texts.items()]


def _train_each(folder, lines):
    (folder / "lines.json").write_text(json.dumps(lines))
    (folder / "lines.json.texts").write_text(json.dumps(TEXTS))
    script = folder / "train_each.py"
    script.write_text(TRAIN_EACH)
    return script


@pytest.mark.slow
def test_accelerates_launcher_starts_the_same_two(runs, tmp_path):
    """The command of docs/reproduce.md, but for the port, which may be taken."""
    arguments, folder = runs["mlp"]
    script = _train_each(tmp_path, [_words({**arguments, "output_dir": tmp_path / "mlp"})])
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    assert f"ACCELERATE_USE_CPU=true accelerate launch {options}" in (ROOT / "docs" / "reproduce.md").read_text("utf-8")
    command = [*(sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--dynamo_backend", "no")]
    command += ["--main_process_port", "0", str(script), str(tmp_path)]
    # Without the first, two processes would not know of each other.
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}",
    }
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    launched, forked = read_record(tmp_path / "mlp"), read_record(folder)
    assert launched.hardware["processes"] == 2
    assert launched.epochs == forked.epochs


def both(run, tmp_path):
    """(record of one process, record of two), and their networks' tensors."""
    arguments, folder = run
    alone = run_benchmark(*parse_mapping({**arguments, "output_dir": str(tmp_path)}))
    together = read_record(folder)
    assert (alone.hardware["processes"], together.hardware["processes"]) == (1, 2)
    differing = {name for name in alone.config if alone.config[name] != together.config[name]}
    assert differing == set(), "not the same run"
    networks = [load_file(path / "model.safetensors") for path in (tmp_path, folder)]
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


def test_the_mlp(runs, tmp_path):
    """640 rows are 10 batches of 64, or of 2 × 32; 48 rows to evaluate are 6 batches of 8, or 3 of 2 × 8."""
    alone, together, first, second = both(runs["mlp"], tmp_path)
    assert_same_epochs(alone, together, ("score", "relu_score", "relu_unchanged_predictions"), 0)
    assert_same_epochs(alone, together, ("loss", "relu_loss"), 1e-5)
    assert_same_networks(first, second)
    assert alone.last.loss < 0.8 * alone.epochs[0].loss


def test_a_tiny_gpt2(runs, tmp_path):
    """40 rows are 5 batches of 8, or of 2 × 4; 13 rows to evaluate in 2 × 4 leave 5, filled up with 3 that must not
    count. Trainer's mean loss of such a batch counts them, and perplexity does not."""
    alone, together, first, second = both(runs["gpt2"], tmp_path)
    assert (alone.data["train_samples"], alone.data["eval_samples"]) == (40, 13)
    assert_same_epochs(alone, together, ("score", "relu_score"), 1e-5)
    assert_same_networks(first, second)
    assert alone.last.score < 0.9 * alone.epochs[0].score


def test_the_recipes_batch_is_divided_and_its_files_are_written_once(runs):
    _, folder = runs["recipe"]
    record = read_record(folder)
    assert record.config["train_batch_size"] == BENCHMARKS["mlp-digits"].train_batch_size
    assert record.data["eval_samples"] == 359  # odd, so the last batch is uneven
    assert record.last.score * 359 == pytest.approx(round(record.last.score * 359), abs=1e-9)
    assert json.loads((folder / "relu" / "config.json").read_text())["hidden_act"] == "relu"
    assert list(record.weights) == ["model.safetensors", "relu/model.safetensors"]


def test_every_process_trains_the_same_tokenizer(runs):
    folder = runs["mlp"][1].parent
    here = train_tokenizer(TEXTS, 300, 8).get_vocab()
    assert len(here) == 300
    for rank in (0, 1):
        assert json.loads((folder / f"lines.json.vocabulary{rank}").read_text()) == here
