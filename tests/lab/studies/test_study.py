from pathlib import Path

import pytest
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.studies import experiments
from lgelu_lab.studies.arguments import parse_mapping
from lgelu_lab.studies.experiments import SEEDS, STUDIES, Experiment
from lgelu_lab.studies.records import write_record
from lgelu_lab.studies.run import run_name
from lgelu_lab.studies.study import check_settings, parse_settings, run_study

from hf_lgelu.activation.hardness import DEFAULT_TEMPERATURE, INIT_MODES

EXPERIMENTS = [Experiment(f"b/{letter}", {"benchmark": "mlp-digits", "seed": 0}) for letter in "abcde"]


@pytest.mark.parametrize(  # of the others the runs differ in numbers alone
    "study",
    [
        pytest.param(study, id=name, marks=() if name == "related" else pytest.mark.slow)
        for name, study in STUDIES.items()
    ],
)
def test_every_run_of_a_study_can_be_parsed_and_has_a_folder_of_its_own(study, tmp_path):
    runs = study.build(study.benchmarks)
    names = [run.name for run in runs]
    assert len(set(names)) == len(names) == len(set(map(str, (run.arguments for run in runs))))
    assert {run.arguments["seed"] for run in runs} == set(SEEDS)
    assert {run.arguments["benchmark"] for run in runs} == set(study.benchmarks) <= set(BENCHMARKS)
    for experiment in runs:
        run, training = parse_mapping({**experiment.arguments, "output_dir": str(tmp_path)})
        assert training.run_name == experiment.name
        if not study.folder:
            assert run_name(run, training) == experiment.name
        if study.name != "pretrained":
            assert run.save_final_model == (study.name == "downstream")


LEARNED = ("lambda_gelu-uniform", "lambda_gelu-increasing", "lambda_gelu-decreasing")
PAIRS = ("mlp-adult", "mlp-fmnist", "resnet18-cifar10", "resnet18-cifar100", "deit-tiny-imagenet", "gpt2-wikitext2")


@pytest.mark.parametrize(
    ("study", "benchmarks", "configurations"),
    [
        ("profiles", PAIRS, ("gelu", "relu", *LEARNED)),
        ("substitution", PAIRS, ("gelu", "lambda_gelu-uniform-hardened", "gelu-relufied")),
        ("related", PAIRS[:2], ("relu", "gelu", "silu", "mish", "prelu", "learnable_swish", *LEARNED)),
    ],
)
def test_studies_of_the_paper_name_every_run(study, benchmarks, configurations):
    names = {experiment.name for experiment in STUDIES[study].build(STUDIES[study].benchmarks)}
    expected = {f"{pair}/{name}-seed{seed}" for pair in benchmarks for name in configurations for seed in (0, 1, 2)}
    assert names == expected


def test_the_lists_are_those_of_the_library():
    assert tuple(INIT_MODES) == experiments.INIT_MODES
    assert experiments.PAPER_TEMPERATURE == DEFAULT_TEMPERATURE


def test_finished_runs_are_skipped_and_failures_do_not_stop_the_rest(record_of, tmp_path):
    done, broken = [], {"b/c"}

    def run(arguments):
        name = "/".join(arguments["output_dir"].split("/")[-2:])
        done.append(name)
        if name in broken:
            raise ValueError("no such luck")
        write_record(record_of(), arguments["output_dir"])

    assert run_study(EXPERIMENTS, tmp_path, run=run) == ["b/c"]
    assert done == ["b/a", "b/b", "b/c", "b/d", "b/e"]
    assert "no such luck" in (tmp_path / "b/c/error.txt").read_text()
    broken.clear()
    done.clear()
    assert run_study(EXPERIMENTS, tmp_path, run=run) == []
    assert done == ["b/c"]
    assert not (tmp_path / "b/c/error.txt").exists()


def test_a_record_of_other_settings_is_not_passed_off_as_the_run(tmp_path, monkeypatch):
    experiment = Experiment("digits", {"benchmark": "mlp-digits", "seed": 0, "activation": "relu"})
    short = {"num_train_epochs": 1, "max_train_samples": 64, "use_cpu": True}
    assert run_study([experiment], tmp_path, overrides=short) == []
    written = (tmp_path / "digits" / "record.json").stat().st_mtime_ns
    assert run_study([experiment], tmp_path, overrides=short) == []
    assert (tmp_path / "digits" / "record.json").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match=r"num_train_epochs.*1.*2.*folder"):
        run_study([experiment], tmp_path, overrides={**short, "num_train_epochs": 2})
    with pytest.raises(ValueError, match=r"max_eval_samples.*None.*7"):
        run_study([experiment], tmp_path, overrides={**short, "max_eval_samples": 7})
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as accelerate launch sets it
    with pytest.raises(ValueError, match=r"bf16.*False.*True"):
        run_study([experiment], tmp_path, overrides=short)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("num_epochs=3", "num_epochs.*--help"),
        ("bf16=False", "bf16.*true or false.*'False'"),
        ("channels_last=0", "channels_last.*true or false.*0"),
        ("max_grad_norm=.5", "max_grad_norm.*number.*'.5'"),
        ("max_train_samples=5k", "max_train_samples.*number.*'5k'"),
    ],
)
def test_text_is_no_number_and_no_switch(setting, words):
    """transformers would take "False" for true."""
    with pytest.raises(ValueError, match=words):
        check_settings(parse_settings([setting]), [])
    pairs = ["bf16=false", "max_grad_norm=0.5", "optim=sgd", "lr_scheduler_type=cosine", "fsdp=full_shard"]
    check_settings(parse_settings([*pairs, "max_train_samples=null", "eval_delay=1.5"]), [])


@pytest.mark.parametrize("name", ["seed", "harden", "temperature", "output_dir"])
def test_a_setting_that_tells_runs_apart_is_refused(name):
    grid = STUDIES["grid"].build(["mlp-fmnist"], [0])
    check_settings({"bf16": True, "save_final_model": True, "max_steps": 3}, grid)
    with pytest.raises(ValueError, match=f"^{name} "):
        check_settings({"bf16": True, name: 1}, grid)


def test_a_setting_of_hardening_goes_to_the_runs_that_read_it(record_of, tmp_path):
    """The others would be refused, not trained."""
    kinds = {"plain": {}, "hardened": {"harden": True}, "relufied": {"relufication": True}}
    got = {}
    settings = {"switch_fraction": 0.5, "hardening_schedule": "geometric", "max_steps": 3}
    experiments = [Experiment(name, arguments) for name, arguments in kinds.items()]

    def run(arguments):
        got[Path(arguments["output_dir"]).name] = arguments.keys() & settings.keys()
        write_record(record_of(), arguments["output_dir"])

    assert run_study(experiments, tmp_path, overrides=settings, run=run) == []
    assert got == {"plain": {"max_steps"}, "hardened": settings.keys(), "relufied": {"max_steps", "switch_fraction"}}
