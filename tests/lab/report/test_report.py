"""The report on the committed records is the committed one; what it is written to, and the script."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from lgelu_lab.measurements.records import write_measurement
from lgelu_lab.report.drawing import save
from lgelu_lab.report.frames import read_frames
from lgelu_lab.report.paper import read_paper_values
from lgelu_lab.report.write import ALL_TABLES, END, FIGURES, SECTIONS, START, put_results, read_downstream
from lgelu_lab.studies.records import read_records, write_record
from matplotlib import image
from PIL import Image

ROOT = Path(__file__).parents[3]
CARDS = ROOT / "model_cards"
SCRIPT = ROOT / "scripts" / "report.py"


@pytest.fixture(scope="module")
def committed():
    records, measurements = read_downstream(CARDS / "downstream", read_records(CARDS / "records"))
    return read_frames(records, measurements, paper=read_paper_values())


def test_every_table_has_a_section():
    assert sorted(name for spec in SECTIONS.values() for name in spec.tables) == sorted(ALL_TABLES)


@pytest.mark.parametrize("key", FIGURES)
def test_the_committed_picture_is_that_which_is_drawn(key, committed, tmp_path):
    """By what is written in it; nothing touches an edge, where it would be cut off."""
    path = save(FIGURES[key](committed), tmp_path / f"{key}.png")
    words = []
    for made in (path, CARDS / "report" / "figures" / f"{key}.png"):
        with Image.open(made) as picture:
            words.append(picture.text["Description"].splitlines())
    assert words[0] == words[1]
    assert len(words[0]) > 20
    assert touches_no_edge(path)


def touches_no_edge(path):
    pixels = image.imread(path)[..., :3]
    return np.all(pixels[[0, -1], :] == 1) and np.all(pixels[:, [0, -1]] == 1)


def test_a_report_on_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one record"):
        read_frames([])


def test_the_results_replace_what_was_between_the_marks():
    text = f"# Title\n\n{START}\nold\n{END}\n\nmore\n"
    once = put_results(text, "| new |")
    assert once == f"# Title\n\n{START}\n\n| new |\n\n{END}\n\nmore\n"
    assert put_results(once, "| new |") == once


@pytest.mark.parametrize("text", ["", START, f"{END}\n{START}", f"{START}{END}{START}{END}"])
def test_a_readme_without_its_marks_is_left_alone(text):
    with pytest.raises(ValueError, match="once each"):
        put_results(text, "| new |")


@pytest.fixture
def script(monkeypatch, record_of, tmp_path):
    """Runs scripts/report.py on two runs, with more arguments; gives its exit status."""
    for seed in range(2):
        write_record(record_of(seed=seed), tmp_path / "runs" / "mlp-adult" / f"gelu-seed{seed}")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["report.py", "--runs", str(tmp_path / "runs"), *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return ended.value.code

    return run


def test_the_script_writes_report_and_readme_and_prints_the_results(
    script, measurement_of, record_of, tmp_path, capsys
):
    measured, readme = tmp_path / "measured", tmp_path / "README.md"
    row = dict.fromkeys(("kl", "agreement", "max_logit_change", "seconds", "refusal"))
    row |= {"model": "gelu", "method": "refit", "rows": 64, "score": 0.5, "original_score": 0.5}
    write_measurement(measurement_of("conversion", [row], benchmark="mlp-digits"), measured)
    name = "downstream/mlp-digits/gelu-seed0"
    write_record(record_of(benchmark="mlp-digits", name=name), measured / "runs" / name)
    (tmp_path / "real.md").write_text(f"# Mine\n{START}{END}\n")
    for page in ("results.md", "lab/conversion.md"):
        (tmp_path / "docs" / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs" / page).write_text(f"{START}{END}\n")
    readme.symlink_to(tmp_path / "real.md")
    assert script("--output_dir", tmp_path / "out", "--downstream", measured, "--pages", tmp_path) == 0
    shown = "| mlp-adult [a] | 0.8500 ± 0.0000 (2 of 3 seeds) |"
    assert shown in capsys.readouterr().out
    assert "| MLP, Adult | accuracy |" in readme.read_text()
    assert readme.is_symlink()
    assert "## Downstream: ReLU without training" in (tmp_path / "out" / "tables.md").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "figures" / "path.png").is_file()


def test_what_cannot_be_read_is_refused_before_anything_is_written(script, tmp_path, capsys):
    assert script("--output_dir", tmp_path / "out", "--downstream", tmp_path / "runs") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match("FileNotFoundError: .*no measurement below", line)
    assert not (tmp_path / "out").exists()
