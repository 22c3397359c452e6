"""Finding the trained networks of a study and recording a measurement on them, end to end on the digits."""

import dataclasses
import json
import re
import shutil
import sys

import measure as script
import pytest
import torch
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import MODELS, evaluate, find_models, load_data
from lgelu_lab.measurements.records import read_measurement
from lgelu_lab.measurements.run import run_measurement
from lgelu_lab.studies.experiments import STUDIES
from lgelu_lab.studies.study import run_study

DIGITS = BENCHMARKS["mlp-digits"]


@dataclasses.dataclass(frozen=True)
class CountSettings:
    samples: int = 4
    factors: tuple[float, ...] = (1.0, 2.0)


def count_parameters(models, benchmark, data, settings):
    return [
        {"model": name, "parameters": sum(p.numel() for p in model.load().parameters()), "rows": len(data.eval)}
        for name, model in models.items()
    ]


COUNT = Measurement("count", ("mlp-digits",), ("gelu", "hardened_relu"), CountSettings, count_parameters)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The study's four runs on the digits, cut to two epochs, 512 rows and 100 evaluation rows."""
    folder = tmp_path_factory.mktemp("runs")
    experiments = STUDIES["downstream"].build(["mlp-digits"], [0])
    short = {"num_train_epochs": 2, "max_train_samples": 512, "max_eval_samples": 100, "switch_fraction": 0.5}
    assert run_study(experiments, folder, overrides=short) == []
    return folder


def test_every_network_of_the_study_is_found_and_is_what_its_name_says(runs):
    models = find_models(runs, "mlp-digits", 0, MODELS)
    assert tuple(models) == ("gelu", "relu", "lambda_gelu", "hardened", "hardened_relu")
    kinds = {name: {type(layer.activation).__name__ for layer in model.load().layers} for name, model in models.items()}
    assert kinds == {
        "gelu": {"GELUActivation"}, "relu": {"ReLU"}, "lambda_gelu": {"LambdaGELU"}, "hardened": {"LambdaGELU"},
        "hardened_relu": {"ReLU"},
    }  # fmt: skip
    hardened, swapped = models["hardened"].load(), models["hardened_relu"].load()
    assert torch.equal(hardened.classifier.weight, swapped.classifier.weight)
    assert hardened.layers[3].activation.hardness.item() == pytest.approx(159.576912)
    assert not torch.equal(hardened.classifier.weight, models["lambda_gelu"].load().classifier.weight)
    assert not swapped.training


def test_evaluation_is_what_a_plain_loop_counts_and_what_the_run_recorded(runs):
    models = find_models(runs, "mlp-digits", 0, ("gelu", "hardened", "hardened_relu"))
    data = load_data(models["gelu"].record)
    assert len(data.eval) == 100  # as in the run
    for name in ("gelu", "hardened"):
        model = models[name].load()
        batch = DIGITS.collate(data.eval.__getitems__(list(range(100))))
        right = (model(batch["features"]).logits.argmax(-1) == batch["labels"]).sum().item()
        scores = evaluate(model, DIGITS, data)
        assert scores["accuracy"] == right / 100 == models[name].summary()["score"]
        assert scores["relu_accuracy"] == models[name].summary()["relu_score"]
    assert "relu_accuracy" not in evaluate(models["hardened_relu"].load(), DIGITS, data)


def test_a_measurement_is_recorded_once(runs, tmp_path):
    record = run_measurement(COUNT, "mlp-digits", 0, runs, tmp_path, CountSettings())
    assert read_measurement(tmp_path / "mlp-digits" / "count-seed0.json") == record
    parameters = 65 * 256 + 3 * 257 * 256 + 257 * 10
    assert record.rows == (
        {"model": "gelu", "parameters": parameters, "rows": 100},
        {"model": "hardened_relu", "parameters": parameters, "rows": 100},
    )
    assert record.settings == {"samples": 4, "factors": [1.0, 2.0]}
    assert record.models["hardened_relu"]["run"] == "downstream/mlp-digits/lambda_gelu-uniform-hardened-seed0"
    assert record.models["hardened_relu"]["target_hardness"] == pytest.approx(159.576912)
    assert record.models["gelu"]["target_hardness"] is None
    assert record.versions["torch"] == torch.__version__.partition("+")[0]

    again = dataclasses.replace(COUNT, measure=lambda *args: pytest.fail("measured twice"))
    assert run_measurement(again, "mlp-digits", 0, runs, tmp_path, CountSettings()) == record
    with pytest.raises(ValueError, match="samples=4"):
        run_measurement(again, "mlp-digits", 0, runs, tmp_path, CountSettings(samples=5))


def test_missing_networks_are_named_with_the_command_that_trains_them(runs, tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape("--study downstream --benchmarks mlp-digits --seeds 1")):
        run_measurement(COUNT, "mlp-digits", 1, runs, tmp_path, CountSettings())


@pytest.fixture
def rewritten(runs, tmp_path):
    """(a copy of the runs, a function that changes the record of one of its networks)"""
    copy = shutil.copytree(runs, tmp_path / "runs")

    def rewrite(name, part, **values):
        path = copy / "downstream" / "mlp-digits" / f"{name}-seed0" / "record.json"
        raw = json.loads(path.read_text())
        raw[part] |= values
        path.write_text(json.dumps(raw))

    return copy, rewrite


def test_networks_that_were_trained_on_other_data_are_not_measured(rewritten, tmp_path):
    runs, rewrite = rewritten
    copy = {"source": "local folder digits", "copy_of": "a/digits", "folder": "digits", "files": {"train.csv": 3}}
    rewrite("lambda_gelu-uniform-hardened", "data", **copy)
    message = r"run downstream/mlp-digits/\S+-hardened-seed0 read other data: a copy of a/digits .*, and now sci"
    with pytest.raises(ValueError, match=message):
        run_measurement(COUNT, "mlp-digits", 0, runs, tmp_path, CountSettings())
    with pytest.raises(ValueError, match=message):
        load_data(find_models(runs, "mlp-digits", 0, ("hardened",))["hardened"].record)


def test_the_script_says_what_was_measured_and_what_failed(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lgelu_lab.measurements.run.MEASUREMENTS", {"count": COUNT})
    line = ["measure.py", "--runs", str(runs), "--output_dir", str(tmp_path), "--measurements", "count"]
    monkeypatch.setattr(sys, "argv", line)
    assert script.main() == 0
    assert "mlp-digits/count-seed0: 2 rows" in capsys.readouterr().out
    for more, told in (
        (("--seeds", "1"), "no trained network in"),
        (("--settings", "sample=3"), "unexpected keyword argument 'sample'"),
        (("taste",), "unknown measurement 'taste'; accepted:"),
        (("--benchmarks", "mlp_digits"), "unknown benchmark 'mlp_digits'; accepted: mlp-digits"),
        (("--benchmarks", "mlp-adult"), "failed: mlp-adult/count-seed0: ValueError: count is measured on mlp-digits"),
    ):
        monkeypatch.setattr(sys, "argv", [*line, *more])
        assert script.main() == 1
        assert told in capsys.readouterr().err
