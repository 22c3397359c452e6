import json

import pytest
from lgelu_lab.report.configurations import configuration_key, configuration_label
from lgelu_lab.report.paper_values import CONFIGURATION_KEYS, read_paper_values
from lgelu_lab.studies.experiments import STUDIES


def write(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_labels_and_keys_are_both_understood(record_of, tmp_path):
    path = write(
        tmp_path / "paper.json",
        {
            "mlp-adult": {
                "GELU": {"best_validation_score": [0.5, 0.25], "mean_hardness": 3},
                "lambda_gelu-uniform-hardened": {"substituted": 0.125},
            }
        },
    )
    values = read_paper_values(path)
    hardened = record_of(activation="lambda_gelu", harden=True)
    assert values.text(record_of(), "best_validation_score", 4) == "0.5000 ± 0.2500"
    assert values.text(record_of(), "mean_hardness", 2) == "3.00"
    assert values.text(record_of(), "substituted", 4) == "–"
    assert values.text(hardened, "substituted", 4) == "0.1250"
    assert values.text(record_of(benchmark="mlp-fmnist"), "mean_hardness", 2) == "–"
    assert values.has("substituted")
    assert not values.has("drift")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], r"paper\.json must be an object of names, got \[\]"),
        ({"mlp-mnist": {}}, r"benchmark 'mlp-mnist' is unknown; accepted: .*mlp-adult"),
        ({"mlp-adult": 3}, r"mlp-adult must be an object"),
        ({"mlp-adult": {"Gelu": {}}}, r"configuration 'Gelu' is unknown; accepted: GELU, .*lambda_gelu-uniform"),
        ({"mlp-adult": {"GELU": {"accuracy": 1}}}, r"quantity 'accuracy' is unknown; accepted: best_validation_score"),
        (
            {"mlp-adult": {"GELU": {"drift": "1.5"}}},
            r"must be a number or \[mean, standard deviation\], got '1.5'",
        ),
        ({"mlp-adult": {"GELU": {"drift": [1, 2, 3]}}}, r"got \[1, 2, 3\]"),
        ({"mlp-adult": {"GELU": {"drift": [1, -2]}}}, r"got \[1, -2\]"),
        ({"mlp-adult": {"GELU": {"drift": True}}}, r"got True"),
        ({"mlp-adult": {"GELU": {"drift": float("nan")}}}, r"got nan"),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_what_is_accepted(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        read_paper_values(write(tmp_path / "paper.json", value))


def test_a_file_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "paper.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        read_paper_values(tmp_path / "paper.json")
    with pytest.raises(FileNotFoundError):
        read_paper_values(tmp_path / "elsewhere.json")


def test_every_configuration_of_the_studies_can_be_named(record_of, tmp_path):
    """By its key and by its label, so that no row of the tables is out of a file's reach."""
    runs = []
    for name in ("profiles", "substitution", "related"):
        for experiment in STUDIES[name].build(("mlp-adult",), seeds=(0,)):
            arguments = dict(experiment.arguments)
            run = record_of(activation=arguments["activation"], harden=arguments.get("harden", False))
            run.config.update(arguments)
            assert experiment.name == f"mlp-adult/{configuration_key(run)}-seed0"
            runs.append(run)
    assert {configuration_key(run) for run in runs} <= set(CONFIGURATION_KEYS)
    for name in (configuration_key, configuration_label):
        path = write(tmp_path / "paper.json", {"mlp-adult": {name(run): {"drift": 1} for run in runs}})
        assert {read_paper_values(path).text(run, "drift", 1) for run in runs} == {"1.0"}
