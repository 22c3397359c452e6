"""The report on the committed records is the committed one; what it is written to, and the script."""

import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from lgelu_lab.measurements.records import write_measurement
from lgelu_lab.report.drawing import draw_all
from lgelu_lab.report.frames import read_frames
from lgelu_lab.report.markup import build_table, to_markdown
from lgelu_lab.report.paper import read_paper_values
from lgelu_lab.report.results import PATH
from lgelu_lab.report.write import (
    ALL_FIGURES,
    ALL_TABLES,
    END,
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
    assert there.count("\n### ") == len(tables)
    for key, table in tables.items():
        assert f"\n\n{to_markdown(table, level=3)}\n" in there, key
    assert not re.search(r"\b(nan|inf|None|True|False)\b", there)


def test_the_readme_shows_the_tables_of_the_committed_records(committed):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert put_results(text, page_tables(committed, README_TABLES)) == text


def test_every_table_and_figure_has_a_section():
    placed = [name for spec in SECTIONS.values() for name in (*spec.tables, *spec.figures)]
    assert sorted([*placed, "path"]) == sorted([*ALL_TABLES, *ALL_FIGURES])


@pytest.mark.usefixtures("rendered")
def test_the_committed_picture_is_that_which_is_drawn(committed, tmp_path):
    """By what is written in it; nothing touches an edge, where it would be cut off."""
    (drawing,) = draw_all("path", PATH, committed)
    path = drawing.save(tmp_path)
    words = []
    for made in (path, CARDS / "report" / "figures" / "path.png"):
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
    assert top == {"tables.md", "report.html", "figures"}
    assert len([path for path in written if path.suffix == ".png"]) == 1
    assert [path.name for path in tmp_path.rglob("*.html")] == ["report.html"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<b>_{" not in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page), "the page needs nothing else"
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
    row = {"model": "gelu", "layer": "a", "gate": "gelu", "units": 8, "values": 9, "apoz": 0.0, "off_fraction": 0.25}
    row |= {"near_zero_fraction": 0.0, "mean_absolute": 1.0, "dead_units": 0, "never_on_units": 0}
    write_measurement(measurement_of("zeros", [row]), measured)
    name = "downstream/mlp-digits/gelu-seed0"
    write_record(record_of(benchmark="mlp-digits", name=name), measured / "runs" / name)
    (tmp_path / "real.md").write_text(f"# Mine\n{START}{END}\n")
    readme.symlink_to(tmp_path / "real.md")
    assert script("--output_dir", tmp_path / "out", "--downstream", measured, "--readme", readme) == 0
    shown = "| mlp-adult [a] | 0.8500 ± 0.0000 (2 of 3 seeds) |"
    assert shown in capsys.readouterr().out
    assert "| MLP, Adult | accuracy |" in readme.read_text()
    assert readme.is_symlink()
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert 'id="downstream-zeros"' in page
    assert (tmp_path / "out" / "figures" / "path.png").is_file()


def test_what_cannot_be_read_is_refused_before_anything_is_written(script, tmp_path, capsys):
    assert script("--output_dir", tmp_path / "out", "--downstream", tmp_path / "runs") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match("FileNotFoundError: .*no measurement below", line)
    assert not (tmp_path / "out").exists()
