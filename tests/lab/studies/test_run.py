import hashlib
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from lgelu_lab.benchmarks.data import DataOptions
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.studies.arguments import parse_command_line, parse_mapping, recipe
from lgelu_lab.studies.records import read_record, require_own_weights
from lgelu_lab.studies.run import DivergedError, run_benchmark, run_config
from timm.optim import Muon
from transformers import AutoModel

from hf_lgelu import LambdaGELUTrainer, hardness_profile
from hf_lgelu.models.mlp import MLPForClassification

SHORT = {"num_train_epochs": 4, "max_train_samples": 256, "use_cpu": True, "disable_tqdm": True, "log_level": "error"}


def digits(folder, **arguments):
    return run_benchmark(*parse_mapping({"benchmark": "mlp-digits", "output_dir": str(folder), **SHORT, **arguments}))


@pytest.fixture(scope="module")
def hardened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hardened")
    return folder, digits(folder, harden=True, seed=3)


def test_the_record_says_what_was_run(hardened):
    _, record = hardened
    config = record.config
    assert (config["activation"], config["harden"], config["seed"]) == ("lambda_gelu", True, 3)
    assert (config["optim"], config["learning_rate"], config["weight_decay"]) == ("sgd", 0.05, 1e-4)
    assert config["target_hardness"] == pytest.approx(159.5769, abs=1e-4)
    assert config["hardness_lr_multiplier"] == 9.0
    assert record.data["train_samples"] == 256
    assert record.model["activation_sites"] == 4
    # 64·256 + 3·256² weights, 4·256 biases, 256·10 + 10 classifier, 4 raw hardnesses
    assert record.model["parameters"] == 64 * 256 + 3 * 256**2 + 4 * 256 + 256 * 10 + 10 + 4
    assert record.versions["torch"] == torch.__version__.split("+")[0] or record.versions["torch"] == torch.__version__
    assert record.hardware["processes"] == 1


def test_epochs_follow_algorithm_1(hardened):
    _, record = hardened
    assert [epoch.epoch for epoch in record.epochs] == [1, 2, 3, 4]
    soft = record.epochs[0].hardness
    assert all(1 < value < 1.1 for value in soft.values())
    for number in (2, 3, 4):  # e_s = 1, T = 4
        for site, value in record.epochs[number - 1].hardness.items():
            expected = soft[site] + (number - 1) / 3 * (record.config["target_hardness"] - soft[site])
            assert value == pytest.approx(expected, rel=1e-6)
    assert list(record.initial_hardness.values()) == pytest.approx([1.0067] * 4, abs=1e-6)


def test_the_saved_networks_score_what_the_record_says(hardened):
    folder, record = hardened
    data = BENCHMARKS["mlp-digits"].load(DataOptions(max_train_samples=256))
    soft = AutoModel.from_pretrained(folder).eval()
    relu = MLPForClassification.from_pretrained(folder / "relu").eval()
    assert list(hardness_profile(soft).values()) == pytest.approx([record.config["target_hardness"]] * 4)
    assert relu.config.hidden_act == "relu"
    assert not any("hardness" in name for name in relu.state_dict())
    with torch.no_grad():
        before, after = (model(features=data.eval.features).logits for model in (soft, relu))
    scores = [(logits.argmax(-1) == data.eval.labels).double().mean().item() for logits in (before, after)]
    assert scores == pytest.approx([record.last.score, record.last.relu_score], abs=1e-12)
    assert (before - after).abs().max().item() == pytest.approx(record.last.relu_max_logit_change, rel=1e-4)
    stayed = (before.argmax(-1) == after.argmax(-1)).double().mean().item()
    assert record.last.relu_unchanged_predictions == pytest.approx(stayed, abs=1e-12)
    assert all(epoch.relu_max_logit_change is None for epoch in record.epochs[:-1])


def test_an_optimizer_of_timm_takes_the_place_of_the_recipes(tmp_path, monkeypatch):
    made = []
    create = LambdaGELUTrainer.create_optimizer
    monkeypatch.setattr(LambdaGELUTrainer, "create_optimizer", lambda *a: made.append(create(*a)) or made[-1])
    record = digits(tmp_path, timm_optimizer="nmuon", learning_rate=0.01, num_train_epochs=1, max_train_samples=64)
    optimizer = made[0]
    assert type(optimizer) is Muon
    assert record.config["optim"] == "nmuon"
    assert record.config["adam_beta2"] is None  # the fallback has timm's 0.95, and not Trainer's 0.999
    assert {tuple(group["betas"]) for group in optimizer.param_groups} == {(0.9, 0.95)}
    assert all(group["nesterov"] for group in optimizer.param_groups)
    decayed, _, learned = optimizer.param_groups
    assert (decayed["initial_lr"], decayed["weight_decay"]) == (0.01, 1e-4)  # the benchmark's decay
    assert (learned["initial_lr"], learned["weight_decay"]) == (pytest.approx(0.09), 0)
    # Newton-Schulz is for matrices; s goes by AdamW.
    assert [optimizer.state[s]["use_muon"] for s in learned["params"]] == [False] * 4
    assert all(optimizer.state[weight]["use_muon"] for weight in decayed["params"][:-1])
    assert list(record.last.hardness.values()) != pytest.approx(list(record.initial_hardness.values()), abs=1e-3)


def test_init_modes_and_temperature_reach_the_model(tmp_path):
    record = digits(
        tmp_path, init_mode="increasing", init_hardness=1.5, high_hardness=3.0, temperature=0.3, num_train_epochs=1
    )
    assert list(record.initial_hardness.values()) == pytest.approx([1.5, 2.0, 2.5, 3.0], rel=1e-6)
    saved = AutoModel.from_pretrained(tmp_path)
    assert saved.layers[0].activation.temperature.item() == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation": "gelu", "harden": True}, "lambda_gelu, .*'gelu'"),
        ({"activation": "gleu"}, "'gleu'.*gelu.*lambda_gelu"),
        ({"image_size": 64}, "mlp-digits .*image_size"),
        ({"dataloader_num_workers": 1, "dataloader_persistent_workers": True}, "crops and flips"),
        ({"timm_optimizer": "nmuonn"}, "nmuonn"),
        ({"eval_delay": 9}, "is never evaluated"),
        ({"eval_strategy": "no"}, "never evaluated"),
        ({"init_mode": "sideways"}, "uniform, increasing, decreasing"),
    ],
)
def test_bad_runs_are_refused_and_leave_no_record(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        digits(tmp_path, num_train_epochs=1, **arguments)
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=lambda benchmark: benchmark.name)
def test_the_command_line_takes_the_recipe_and_every_option_wins_over_it(benchmark, tmp_path):
    line = ["--benchmark", benchmark.name, "--output_dir", str(tmp_path)]
    run, training = parse_command_line(line)
    assert training.learning_rate == benchmark.defaults["learning_rate"]
    assert training.per_device_train_batch_size == benchmark.defaults["per_device_train_batch_size"]
    assert run.init_hardness == benchmark.init_hardness
    _, training = parse_command_line([*line, "--learning_rate", "0.125", "--harden", "--seed", "9"])
    assert (training.learning_rate, training.harden, training.seed) == (0.125, True, 9)


def test_the_batch_of_the_recipe_is_divided_over_processes(monkeypatch):
    benchmark = BENCHMARKS["mlp-digits"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert recipe(benchmark)["per_device_train_batch_size"] * 2 == benchmark.defaults["per_device_train_batch_size"]
    monkeypatch.setenv("WORLD_SIZE", "7")
    with pytest.raises(ValueError, match="7 processes"):
        recipe(benchmark)


def test_a_run_that_hardens_nothing_leaves_no_relu_network_of_an_earlier_one(tmp_path):
    (tmp_path / "relu").mkdir()
    (tmp_path / "relu" / "config.json").write_text("{}")
    digits(tmp_path, num_train_epochs=1)
    assert (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "relu").exists()


def finished(folder):
    return digits(folder, activation="relu", num_train_epochs=1)


def test_a_finished_run_is_not_replaced(tmp_path):
    record = finished(tmp_path)
    with pytest.raises(FileExistsError, match=r"record\.json"):
        digits(tmp_path, activation="gelu")
    assert read_record(tmp_path) == record
    (tmp_path / "record.json").unlink()
    with pytest.raises(FileExistsError, match=r"config\.json"):
        digits(tmp_path, activation="gelu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two epochs that kept the checkpoint of each."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, digits(folder, **TWO_EPOCHS)


TWO_EPOCHS = {"num_train_epochs": 2, "save_strategy": "epoch", "save_final_model": False}


@pytest.fixture
def first_epoch(saved, tmp_path):
    """The folder of that run as it was when it had made its first epoch."""
    folder = Path(shutil.copytree(saved[0], tmp_path / "run"))
    (folder / "record.json").unlink()
    shutil.rmtree(folder / "checkpoint-8")
    return folder


def test_an_interrupted_run_is_not_begun_anew_and_goes_on_as_told(first_epoch, saved):
    there = sorted(path.name for path in first_epoch.rglob("*"))
    with pytest.raises(FileExistsError, match="--resume_from_checkpoint") as told:
        digits(first_epoch, **TWO_EPOCHS)
    assert sorted(path.name for path in first_epoch.rglob("*")) == there
    way = str(told.value).partition("--resume_from_checkpoint ")[2].partition(",")[0]
    assert digits(first_epoch, **TWO_EPOCHS, resume_from_checkpoint=way).epochs == saved[1].epochs


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": 0.01}, r"learning_rate.*0\.05.*0\.01"),
        ({"data_seed": 7}, "data_seed.*None.*7"),
        ({"eval_delay": 1}, "eval_delay.*0.*1"),
        ({"eval_strategy": "steps", "eval_steps": 4}, "eval_strategy.*'epoch'.*'steps', eval_steps"),
        ({"max_train_samples": 255}, "max_train_samples.*256.*255"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(first_epoch, tmp_path, changed, message):
    for folder in (first_epoch, tmp_path / "elsewhere"):
        with pytest.raises(ValueError, match=message):
            digits(folder, **TWO_EPOCHS | changed, resume_from_checkpoint=str(first_epoch / "checkpoint-4"))
        assert not (folder / "record.json").exists()


def test_weights_are_tied_to_their_record(hardened, tmp_path):
    folder, record = hardened
    expected = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in record.weights}
    assert record.weights == expected
    assert list(expected) == ["model.safetensors", "relu/model.safetensors"]
    require_own_weights(record, folder)
    finished(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"^model.safetensors.*record.json"):
        require_own_weights(read_record(tmp_path), tmp_path)


def test_a_diverged_run_ends_at_once_and_keeps_what_there_was(tmp_path):
    with pytest.raises(DivergedError, match=r"epoch \d .*(nan|inf).*learning_rate"):
        digits(tmp_path, activation="gelu", learning_rate=1e10, num_train_epochs=6)
    assert [path.name for path in tmp_path.iterdir()] == ["failed.json"]
    failed = read_record(tmp_path / "failed.json")
    assert "has diverged" in failed.failure
    assert all(math.isfinite(epoch.loss) for epoch in failed.epochs)
    assert len(failed.epochs) < 6
    digits(tmp_path, activation="gelu", num_train_epochs=1)
    assert not (tmp_path / "failed.json").exists()


def test_hardening_from_the_first_epoch_is_refused_unless_asked_for(tmp_path):
    """256 rows are 4 batches of 64: 8 steps are 2 epochs."""
    for short in ({"num_train_epochs": 3}, {"max_steps": 8, "num_train_epochs": 9}):
        with pytest.raises(ValueError, match=r"[23] epochs.*switch_fraction.* 4"):
            digits(tmp_path, harden=True, **short)
        assert not (tmp_path / "record.json").exists()
    assert digits(tmp_path, harden=True, **short, switch_fraction=0.0).last.hardness


def test_relufication_in_the_first_epoch_is_refused_unless_asked_for(tmp_path):
    rival = {"activation": "gelu", "relufication": True, "num_train_epochs": 3}
    with pytest.raises(ValueError, match=r"3 epochs.* 4 epochs"):
        digits(tmp_path, **rival)
    assert not (tmp_path / "record.json").exists()
    record = digits(tmp_path, **rival, switch_fraction=0.1 + 0.3)  # a fraction that is not the default's
    assert [epoch.relu_score is None for epoch in record.epochs] == [False, True, True]
    assert (record.config["relufication"], record.config["switch_fraction"]) == (True, 0.4)


def test_no_file_of_a_run_holds_the_hub_token(tmp_path, monkeypatch):
    token = "hf_" + "notARealToken" * 2
    monkeypatch.setenv("HF_TOKEN", "")  # what the run sets is undone
    digits(tmp_path, activation="relu", num_train_epochs=1, hub_token=token, save_strategy="epoch")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "training_args.bin" in {path.name for path in files}
    assert [path for path in files if token.encode() in path.read_bytes()] == []
    assert os.environ["HF_TOKEN"] == token


def test_the_cpu_recipe_is_ours_and_only_where_there_is_one(tmp_path):
    line = ["--benchmark", "resnet18-cifar10", "--output_dir", str(tmp_path), "--use_cpu"]
    run, training = parse_command_line([*line, "--recipe", "cpu"])
    assert (training.num_train_epochs, training.learning_rate, training.weight_decay) == (8, 0.02, 0.12)
    assert (training.bf16, run.channels_last, run.timm_optimizer) == (True, True, "nmuon")
    assert training.lr_scheduler_type == "linear"
    config = run_config(run, training)
    assert (config["optim"], config["train_batch_size"], config["label_smoothing_factor"]) == ("nmuon", 512, 0.1)
    assert parse_command_line([*line, "--recipe", "cpu", "--num_train_epochs", "3"])[1].num_train_epochs == 3
    assert parse_command_line(line)[1].num_train_epochs == 75


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--benchmark", "mlp-digits", "--output_dir", "x", "--learning_rte", "1"], "--learning_rte"),
        (["--benchmark", "mlp-iris", "--output_dir", "x"], "invalid choice: 'mlp-iris'"),
        (["--benchmark", "mlp-digits", "--recipe", "cpu", "--output_dir", "x"], "has no recipe 'cpu'; every benchmark"),
    ],
)
def test_a_wrong_call_is_answered_with_one_line(line, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_command_line(line)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in told
    assert told.count("\n") == 1
    assert told.endswith("; --help lists the options\n")
