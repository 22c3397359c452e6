"""Two processes with half the batch each do what one process does, but for the order of additions."""

import json

import pytest
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.studies.arguments import parse_mapping
from lgelu_lab.studies.records import read_record
from lgelu_lab.studies.run import run_benchmark
from safetensors.torch import load_file
from two_processes import run_in_two_processes

pytestmark = pytest.mark.slow  # two runs in processes of their own
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
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: (arguments, folder)} of runs that scripts/train.py made, one after the other, in one launch of two."""
    folder = tmp_path_factory.mktemp("runs")
    limits = {"max_train_samples": 640, "max_eval_samples": 48, "per_device_eval_batch_size": 8, "learning_rate": 0.5}
    made = {
        "mlp": {**ARGUMENTS, "benchmark": "mlp-digits", **limits},
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
    script = folder / "train_each.py"
    script.write_text(TRAIN_EACH)
    return script


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


def test_the_recipes_batch_is_divided_and_its_files_are_written_once(runs):
    _, folder = runs["recipe"]
    record = read_record(folder)
    assert record.config["train_batch_size"] == BENCHMARKS["mlp-digits"].defaults["per_device_train_batch_size"]
    assert record.data["eval_samples"] == 359  # odd, so the last batch is uneven
    assert record.last.score * 359 == pytest.approx(round(record.last.score * 359), abs=1e-9)
    assert json.loads((folder / "relu" / "config.json").read_text())["hidden_act"] == "relu"
    assert list(record.weights) == ["model.safetensors", "relu/model.safetensors"]
