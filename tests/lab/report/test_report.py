"""The report on the committed records is the committed one; what it is written to, and the script."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from lgelu_lab.measurements.records import write_measurement
from lgelu_lab.report import check
from lgelu_lab.report.drawing import draw
from lgelu_lab.report.frames import read_frames
from lgelu_lab.report.markup import build_table, to_markdown
from lgelu_lab.report.paper import read_paper_values
from lgelu_lab.report.write import (
    ALL_TABLES,
    END,
    FIGURES,
    README_TABLES,
    SECTIONS,
    START,
    page_tables,
    put_results,
    read_downstream,
    write_report,
)
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


@pytest.fixture(scope="module")
def tables(committed):
    return {key: build_table(key, spec, committed) for key, spec in ALL_TABLES.items()}


def test_every_table_is_the_committed_one(tables):
    there = (CARDS / "report" / "tables.md").read_text("utf-8")
    shown = {key: table for key, table in tables.items() if table.rows}
    assert there.count("\n### ") == len(shown)
    for key, table in shown.items():
        assert f"\n\n{to_markdown(table, level=3)}\n" in there, key
    assert not re.search(r"\b(nan|inf|None|True|False)\b", there)


def test_the_readme_shows_the_tables_of_the_committed_records(committed):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert put_results(text, page_tables(committed, README_TABLES)) == text


def test_every_table_has_a_section():
    assert sorted(name for spec in SECTIONS.values() for name in spec.tables) == sorted(ALL_TABLES)


@pytest.mark.usefixtures("rendered")
@pytest.mark.parametrize("key", FIGURES)
def test_the_committed_picture_is_that_which_is_drawn(key, committed, tmp_path):
    """By what is written in it; nothing touches an edge, where it would be cut off."""
    path = draw(key, FIGURES[key], committed).save(tmp_path)
    words = []
    for made in (path, CARDS / "report" / "figures" / f"{key}.png"):
        with Image.open(made) as picture:
            words.append(picture.text["Description"].splitlines())
    assert words[0] == words[1]
    assert len(words[0]) > 20
    pixels = image.imread(path)[..., :3]
    assert np.all(pixels[[0, -1], :] == 1)
    assert np.all(pixels[:, [0, -1]] == 1)


def test_without_torch_a_killed_writer_leaves_a_whole_readme(tmp_path):
    """One process: what reading records and the report loads, then two texts written in turn until it is killed."""
    path = tmp_path / "README.md"
    path.write_text("a" * 20_000_000)
    program = (
        "import pathlib, sys, lgelu_lab.studies.records, lgelu_lab.measurements.records, lgelu_lab.report.write\n"
        "from lgelu_lab.studies.folder import write_whole\n"
        "print(*{'torch', 'transformers', 'timm', 'datasets', 'matplotlib'} & set(sys.modules), flush=True)\n"
        f"while True:\n    for letter in 'ab':\n        write_whole(pathlib.Path({str(path)!r}), letter * 20_000_000)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as writer:
        loaded, begun, end = writer.stdout.readline(), path.stat().st_ino, time.monotonic() + 60
        while not (written := path.stat().st_ino != begun) and time.monotonic() < end:  # its number may come again
            time.sleep(0.01)
        time.sleep(0.05)  # in the middle of a later one
        writer.kill()
    assert written, "nothing was written in a minute"
    assert loaded.split() == []
    text = path.read_text()
    assert len(text) == 20_000_000
    assert set(text) in ({"a"}, {"b"})


@pytest.fixture
def copied_pages(tables, tmp_path, monkeypatch):
    """A folder with the pages and the records, whose cards are not made anew."""
    monkeypatch.setattr(check.Pages, "table", lambda self, key: tables[key])
    monkeypatch.setattr("lgelu_lab.studies.cards.write_committed_cards", lambda source, target: [])
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "model_cards").symlink_to(CARDS)
    return tmp_path


def test_every_number_of_the_pages_is_that_of_a_record(committed, copied_pages):
    assert list(check.complaints(copied_pages, committed)) == []


@pytest.mark.parametrize(
    ("page", "written", "changed", "told"),
    [
        ("README.md", "0.85 to 0.97 of the time", "0.84 to 0.97 of the time", "does not say “the gain is small, 0.85"),
        ("README.md", "| MLP, Adult | accuracy | 0.8555 |", "| MLP, Adult | accuracy | 0.8556 |", "0.8556"),
        ("docs/results.md", "## The profile", "It gains 0.1234.\n\n## The profile", "0.1234 is from no record"),
    ],
)
def test_a_changed_digit_is_named_with_page_and_record(committed, copied_pages, page, written, changed, told):
    text = (copied_pages / page).read_text("utf-8")
    assert text.count(written) == 1
    (copied_pages / page).write_text(text.replace(written, changed), "utf-8")
    assert any(line.startswith(page) and told in line for line in check.complaints(copied_pages, committed))


def test_a_changed_record_is_named_with_the_page(committed, copied_pages):
    there = copied_pages / "docs" / "lab" / "convert" / "time.csv"
    there.write_text(there.read_text().replace("118.457", "128.457"))
    check._rows.cache_clear()
    found = list(check.complaints(copied_pages, committed))
    check._rows.cache_clear()
    assert any(line.startswith("docs/lab/conversion.md says 118") and "time.csv" in line for line in found)


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


def test_names_of_records_are_no_marks_paths_formulas_or_tags(record_of, data_of, tmp_path):
    hostile = f"../../x | $\\frac$ <b>_{{ {END}\n# mine"
    soft = [{"a": 1.5, "b": 1.2}] * 3
    runs = [record_of(benchmark=hostile, metric="$a_$"), record_of(benchmark=hostile, activation="silu")]
    runs.append(record_of(benchmark=hostile, activation="lambda_gelu", hardness=soft))
    data, folder = data_of(runs), tmp_path / "out" / "report"
    written = write_report(data, folder)
    top = {path.relative_to(folder).parts[0] for path in written}
    assert top == {"tables.md"}
    assert "<b>_{" not in (folder / "tables.md").read_text(encoding="utf-8")
    text = put_results(f"{START}{END}", page_tables(data))
    assert text.count(END) == 1
    assert "\n# mine" not in text


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
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results.md").write_text(f"{START}{END}\n")
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
