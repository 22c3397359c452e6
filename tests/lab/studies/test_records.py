import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lgelu_lab.studies.records import EpochRecord, RunRecord, read_record, read_records, write_record

from hf_lgelu.models.hardening import hardening_progress

PATH = [{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 1.5}, {"a": 2.0, "b": 1.5}]


def test_a_record_comes_back_equal(record_of, tmp_path):
    record = record_of(activation="lambda_gelu", hardness=PATH)
    write_record(record, tmp_path / "run")
    assert read_record(tmp_path / "run") == record
    assert read_record(tmp_path / "run" / "record.json") == record
    assert json.loads((tmp_path / "run" / "record.json").read_text())["schema_version"] == 1


def test_best_is_the_earliest_of_equals_and_follows_the_direction(record_of):
    record = record_of(scores=(0.8, 0.9, 0.9), relu_scores=(0.7, 0.6, 0.5))
    assert record.best.epoch == 2
    assert record.last.epoch == 3
    lower = record_of(scores=(3.0, 2.0, 2.5), relu_scores=(3.0, 4.0, 2.9), greater_is_better=False)
    assert lower.best.epoch == 2


def test_drift_is_the_mean_path_length_over_sites(record_of):
    # a: |3-1| + |2-3| = 3;  b: |1.5-2| + 0 = 0.5;  V = 3.5 / 2
    assert record_of(hardness=PATH).drift == pytest.approx(1.75, abs=1e-15)
    assert record_of().drift is None
    assert record_of(hardness=PATH).last.mean_hardness == 1.75
    assert record_of().last.mean_hardness is None


def test_a_record_with_a_nan_is_refused_rather_than_written_as_no_json(record_of, tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_record(record_of(seconds=float("nan")), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(schema_version=7), "schema version 7"),
        (lambda raw: raw.pop("schema_version"), "schema version None"),
        (lambda raw: raw.pop("seconds"), r"missing \['seconds'\]"),
        (lambda raw: raw.update(colour="red"), r"unknown \['colour'\]"),
    ],
)
def test_other_schemas_are_refused_by_name(record_of, tmp_path, change, message):
    path = write_record(record_of(), tmp_path)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        read_record(path)


def test_records_below_a_folder_in_the_order_of_their_paths(record_of, tmp_path):
    for seed in (2, 0, 1):
        write_record(record_of(seed=seed), tmp_path / f"deep/seed{seed}")
    assert [record.config["seed"] for record in read_records(tmp_path)] == [0, 1, 2]
    with pytest.raises(FileNotFoundError, match=r"no record\.json below"):
        read_records(tmp_path / "elsewhere")


def test_as_learned_begins_where_the_library_hardens():
    for total, fraction in itertools.product((1, 2, 3, 7, 10, 50, 100), (0.0, 0.1, 0.25, 0.29, 0.5, 0.99)):
        learned = [e for e in range(1, total + 1) if hardening_progress(e, total, fraction) is None]
        epochs = tuple(EpochRecord(epoch=float(e), score=0.0) for e in range(1, total + 1))
        config = {"harden": True, "num_train_epochs": total, "switch_fraction": fraction}
        record = RunRecord("", "", 0.0, config, {}, {}, "accuracy", True, {}, epochs, {}, {})
        assert (record.as_learned.epoch if record.as_learned else 0) == len(learned), (total, fraction)
        for other in ({"harden": False}, {"max_steps": 15}):
            assert dataclasses.replace(record, config=config | other).as_learned is None


def test_a_failed_run_is_in_no_list_of_records(record_of, tmp_path):
    write_record(record_of(), tmp_path / "whole")
    failed = record_of(failure="training has diverged: at epoch 2", epochs=())
    assert write_record(failed, tmp_path / "broken").name == "failed.json"
    assert [record.failure for record in read_records(tmp_path)] == [None]
    assert read_record(tmp_path / "broken" / "failed.json") == failed


def test_all_committed_records_are_read_without_torch():
    """In a process of its own: of the library only what needs nothing else is imported."""
    script = (
        "import sys\n"
        "import lgelu_lab.report.write, lgelu_lab.studies.experiments\n"
        "from lgelu_lab.measurements.records import read_measurements\n"
        "from lgelu_lab.studies.records import read_records\n"
        "places = ('records', 'downstream/runs')\n"
        "records = [record for place in places for record in read_records(f'model_cards/{place}')]\n"
        "print(len(records), len(read_measurements('model_cards/downstream')))\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root / "scripts")}
    output = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, check=True
    ).stdout
    counts, loaded = output.splitlines()
    files = list((root / "model_cards").rglob("*.json"))
    measured = [path for path in files if "-seed" in path.name]
    assert [int(count) for count in counts.split()] == [len(files) - len(measured), len(measured)]
    heavy = {"torch", "transformers", "timm", "datasets", "matplotlib"}
    assert heavy & set(loaded.split()) == set()
