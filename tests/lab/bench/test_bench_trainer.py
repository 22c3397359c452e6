"""scripts/bench_trainer.py: the network and the optimizer that it times, and the rows that it counts."""

import bench_trainer
import pytest
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.studies.arguments import data_options, model_options, parse_mapping

from hf_lgelu import LambdaGELU


@pytest.fixture
def trainer_of(tmp_path):
    """A trainer of the digits with these settings, for three steps of which one is timed."""

    def make(activation=None, **settings):
        quiet = {"eval_strategy": "no", "logging_strategy": "no", "log_hardness": False, "disable_tqdm": True}
        run, training = parse_mapping(
            {
                "benchmark": "mlp-digits",
                "output_dir": str(tmp_path),
                "use_cpu": True,
                "max_steps": 3,
                **quiet,
                **settings,
            }
        )
        benchmark = BENCHMARKS["mlp-digits"]
        data = benchmark.load(data_options(run), model_options(run))
        return bench_trainer.new_trainer(benchmark, run, training, data, activation=activation)

    return make


@pytest.mark.parametrize("parts", [1, 4])
def test_a_step_counts_the_rows_of_all_its_parts_in_both_loops(trainer_of, parts):
    settings = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": parts}
    for timed in (bench_trainer.trainer_steps, bench_trainer.bare_steps):
        steps = timed(trainer_of(**settings))
        assert steps.rows == [32 * parts]
        assert len(steps.seconds) == 1
        assert steps.rows_per_second == pytest.approx(32 * parts / steps.seconds[0])


def test_the_bare_loop_runs_the_network_once_for_each_part(trainer_of):
    calls = []
    trainer = trainer_of(gradient_accumulation_steps=4)
    trainer.model.register_forward_pre_hook(lambda *_: calls.append(1))
    bench_trainer.bare_steps(trainer)
    assert len(calls) == 4 * 3


def test_the_last_step_of_an_epoch_counts_the_rows_that_it_has(trainer_of):
    trainer = trainer_of(per_device_train_batch_size=32, max_train_samples=80)  # 32, 32, 16
    assert bench_trainer.trainer_steps(trainer).rows == [16]


def test_network_and_optimizer_are_those_of_the_run(trainer_of):
    pytest.importorskip("timm")
    settings = {"granularity": "channel", "timm_optimizer": "nmuon", "learning_rate": 0.02, "init_hardness": 1.5}
    trainer = trainer_of(**settings)
    gates = [module for module in trainer.model.modules() if isinstance(module, LambdaGELU)]
    assert [tuple(gate.raw_hardness.shape) for gate in gates] == [(256,)] * 4
    assert [gate.hardness.min().item() for gate in gates] == pytest.approx([1.5] * 4)
    optimizer = trainer.create_optimizer()
    assert type(optimizer).__name__ == "Muon"
    assert {group["nesterov"] for group in optimizer.param_groups} == {True}
    smooth = trainer_of("gelu", require_lambda_gelu=False, **settings).model
    assert smooth.config.hidden_act == "gelu"
    assert not [module for module in smooth.modules() if isinstance(module, LambdaGELU)]


def test_a_line_says_how_many_rows_a_step_takes(monkeypatch, capsys):
    command = ["--benchmarks", "mlp-digits", "--steps", "1", "--rounds", "1", "--settings"]
    settings = ["gradient_accumulation_steps=2", "per_device_train_batch_size=32", "use_cpu=true", "activation=gelu"]
    monkeypatch.setattr("sys.argv", ["bench_trainer.py", *command, *settings])
    bench_trainer.main()
    assert "mlp-digits: batch 64, " in capsys.readouterr().out
