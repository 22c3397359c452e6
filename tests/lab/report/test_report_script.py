import json
import runpy
import sys
from pathlib import Path

import pytest
from lgelu_lab.measurements.records import write_measurement
from lgelu_lab.studies.records import write_record

SCRIPT = Path(__file__).parents[2] / "scripts" / "report.py"


@pytest.fixture
def report(monkeypatch, record_of, tmp_path):
    """Runs scripts/report.py on two runs and a failed one, with more arguments."""
    for seed in range(2):
        write_record(record_of(seed=seed), tmp_path / "runs" / "mlp-adult" / f"gelu-seed{seed}")
    (tmp_path / "runs" / "mlp-adult" / "relu-seed0").mkdir()
    (tmp_path / "runs" / "mlp-adult" / "relu-seed0" / "error.txt").write_text("OSError: no such luck\n")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["report.py", "--runs", str(tmp_path / "runs"), *map(str, arguments)])
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return run


def test_the_script_writes_the_report_and_prints_the_main_tables(report, tmp_path, capsys):
    values = {"mlp-adult": {"gelu": {"best_validation_score": [0.1234, 0.01]}}}
    (tmp_path / "paper.json").write_text(json.dumps(values))
    report("--output_dir", tmp_path / "out", "--paper_values", tmp_path / "paper.json")
    printed = capsys.readouterr().out
    assert "| mlp-adult | GELU | 0.9000 ± 0.0000 |" in printed
    assert f"Written to {tmp_path / 'out'}" in printed
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "0.1234 ± 0.0100" in page
    assert "OSError: no such luck" in page
    assert not list((tmp_path / "runs").rglob("*.html"))


def test_a_wrong_file_of_the_papers_values_is_refused_before_anything_is_written(report, tmp_path):
    (tmp_path / "paper.json").write_text('{"mlp-adults": {}}')
    with pytest.raises(ValueError, match="benchmark 'mlp-adults' is unknown; accepted: "):
        report("--output_dir", tmp_path / "out", "--paper_values", tmp_path / "paper.json")
    assert not (tmp_path / "out").exists()


def test_downstream_measurements_come_from_a_folder_of_their_own(report, measurement_of, record_of, tmp_path, capsys):
    measured = tmp_path / "measured"
    row = {"model": "gelu", "layer": "a", "gate": "gelu", "units": 8, "values": 9, "apoz": 0.0, "off_fraction": 0.25}
    row |= {"near_zero_fraction": 0.0, "mean_absolute": 1.0, "dead_units": 0, "never_on_units": 0}
    write_measurement(measurement_of("zeros", [row]), measured)
    name = "downstream/mlp-digits/gelu-seed0"
    write_record(record_of(benchmark="mlp-digits", name=name), measured / "runs" / name)
    report("--output_dir", tmp_path / "out", "--downstream", measured)
    printed = capsys.readouterr().out
    assert "| mlp-digits | float32 → int8 | missing |" in printed
    assert "| mlp-digits, downstream |" in printed
    assert "| mlp-digits | GELU |" not in printed, "its network is not one more run of the paper's tables"
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert 'id="downstream-zeros"' in page
    assert {path.name for path in (tmp_path / "out" / "figures").glob("*.png")} >= {"path.png", "downstream-zeros.png"}


def test_a_folder_without_measurements_is_refused_before_anything_is_written(report, tmp_path):
    with pytest.raises(FileNotFoundError, match="no measurement below"):
        report("--output_dir", tmp_path / "out", "--downstream", tmp_path / "runs")
    assert not (tmp_path / "out").exists()
