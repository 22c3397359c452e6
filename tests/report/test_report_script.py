import json
import runpy
import sys
from pathlib import Path

import pytest

from hf_lgelu.studies.records import write_record

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
