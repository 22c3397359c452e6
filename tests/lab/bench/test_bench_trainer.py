"""scripts/bench_trainer.py: the network and the optimizer that it times."""

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


def test_a_line_for_each_way_to_train(monkeypatch, capsys):
    command = ["--benchmarks", "mlp-digits", "--steps", "1", "--rounds", "1", "--settings"]
    settings = ["gradient_accumulation_steps=2", "per_device_train_batch_size=32", "use_cpu=true"]
    monkeypatch.setattr("sys.argv", ["bench_trainer.py", *command, *settings])
    bench_trainer.main()
    _, head, *lines = capsys.readouterr().out.splitlines()
    assert head == "mlp-digits: batch 64"
    assert [line.strip().startswith(name) for line, name in zip(lines, bench_trainer.MODES, strict=True)] == [True] * 6
