import pytest

from hf_lgelu.benchmarks.table import BENCHMARKS
from hf_lgelu.studies.arguments import parse_mapping
from hf_lgelu.studies.experiments import SEEDS, STUDIES, Experiment
from hf_lgelu.studies.records import write_record
from hf_lgelu.studies.run import run_name
from hf_lgelu.studies.study import Worker, check_study, choose_benchmarks, leave_process_group, run_study

EXPERIMENTS = [Experiment(f"b/{letter}", {"benchmark": "mlp-digits", "seed": 0}) for letter in "abcde"]


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_every_run_of_a_study_can_be_parsed_and_has_a_folder_of_its_own(study, tmp_path):
    experiments = study.build(study.benchmarks)
    names = [experiment.name for experiment in experiments]
    assert len(set(names)) == len(names) == len(set(map(str, (e.arguments for e in experiments))))
    assert {experiment.arguments["seed"] for experiment in experiments} == set(SEEDS)
    assert {experiment.arguments["benchmark"] for experiment in experiments} == set(study.benchmarks) <= set(BENCHMARKS)
    for experiment in experiments:
        run, training = parse_mapping({**experiment.arguments, "output_dir": str(tmp_path)})
        assert run_name(run, training) == experiment.name
        assert not run.save_final_model


def test_mlp_study_is_the_table_of_the_paper():
    names = {experiment.name for experiment in STUDIES["mlp"].build(("mlp-adult",))}
    configurations = (
        *("gelu", "relu", "lambda_gelu-uniform", "lambda_gelu-increasing", "lambda_gelu-decreasing"),
        "lambda_gelu-uniform-hardened",
    )
    assert names == {f"mlp-adult/{name}-seed{seed}" for name in configurations for seed in (0, 1, 2)}


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


def test_workers_share_the_runs_without_overlap(record_of, tmp_path):
    done = []
    for index in range(2):
        worker = Worker(index, 2)
        run_study(EXPERIMENTS, tmp_path / str(index), worker=worker, run=lambda run: done.append(run["output_dir"][-1]))
    assert sorted(done) == list("abcde")
    assert done == list("acebd")


def test_overrides_reach_every_run(tmp_path):
    seen = []
    run_study(EXPERIMENTS[:2], tmp_path, overrides={"seed": 7, "num_train_epochs": 1}, run=seen.append)
    assert [(arguments["seed"], arguments["num_train_epochs"]) for arguments in seen] == [(7, 1)] * 2


def test_a_worker_leaves_the_process_group():
    environment = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
        "PATH": "p",
    }
    assert leave_process_group(environment) == Worker(1, 4)
    assert environment == {"PATH": "p", "CUDA_VISIBLE_DEVICES": "1"}
    assert leave_process_group({}) == Worker(0, 1)


def test_unknown_study_names_the_accepted():
    with pytest.raises(ValueError, match="accepted: quickstart, mlp"):
        check_study("everything")


def test_a_study_runs_its_own_benchmarks_only():
    study = STUDIES["mlp"]
    assert choose_benchmarks(study, []) == ("mlp-adult", "mlp-fmnist")
    assert choose_benchmarks(study, ["mlp-fmnist"]) == ("mlp-fmnist",)
    with pytest.raises(ValueError, match="no benchmark 'adult'; accepted: mlp-adult, mlp-fmnist"):
        choose_benchmarks(study, ["mlp-adult", "adult"])


def test_a_record_of_other_settings_is_not_passed_off_as_the_run(tmp_path):
    experiment = Experiment("digits", {"benchmark": "mlp-digits", "seed": 0, "activation": "relu"})
    short = {"num_train_epochs": 1, "max_train_samples": 64, "use_cpu": True}
    assert run_study([experiment], tmp_path, overrides=short) == []
    written = (tmp_path / "digits" / "record.json").stat().st_mtime_ns
    assert run_study([experiment], tmp_path, overrides=short) == []
    assert (tmp_path / "digits" / "record.json").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match=r"num_train_epochs was 1 and is now 2\..* another output folder"):
        run_study([experiment], tmp_path, overrides={**short, "num_train_epochs": 2})
