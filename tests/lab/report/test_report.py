"""The report on the committed records, rendered once; what it is written to, and the script."""

import html
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
from lgelu_lab.report import drawing
from lgelu_lab.report.frames import read_frames
from lgelu_lab.report.paper import read_paper_values
from lgelu_lab.report.write import (
    ALL_FIGURES,
    ALL_TABLES,
    END,
    SECTIONS,
    START,
    build_sections,
    failed_runs,
    page_tables,
    put_results,
    read_downstream,
    summarize,
    write_report,
)
from lgelu_lab.studies.records import read_records, write_record
from matplotlib import image
from matplotlib.text import Text
from PIL import Image

ROOT = Path(__file__).parents[3]
CARDS = ROOT / "model_cards"
SCRIPT = ROOT / "scripts" / "report.py"


@pytest.fixture(scope="session")
def committed():
    records, measurements = read_downstream(CARDS / "downstream", read_records(CARDS / "records"))
    failed = {"mlp-adult/mine-seed0": "ValueError: no such luck"}
    return read_frames(records, measurements, paper=read_paper_values(), failed=failed)


@pytest.fixture(scope="session")
def report(committed, tmp_path_factory):
    """The folder of the report on the committed records, in half the dots, and what `write_report` returned."""
    folder = tmp_path_factory.mktemp("report") / "made"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "DOTS_PER_INCH", 75)
        return folder, write_report(committed, folder)


def tables_of(markdown):
    """{title: rows of cells, the header first}."""
    found = {}
    for line in markdown.splitlines():
        if line.startswith("### "):
            found[line[4:]] = rows = []
        elif line.startswith("| "):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def numbers_of(cells):
    """Every number of some cells, with its sign."""
    return re.findall(r"[−+-]?\d[\d,]*(?:\.\d+)?(?:e[−-]?\d+)?", " ".join(cells))


def test_every_number_is_that_of_the_committed_tables(report):
    made = tables_of((report[0] / "tables.md").read_text("utf-8"))
    there = tables_of((CARDS / "report" / "tables.md").read_text("utf-8"))
    assert list(made) == list(there)
    assert len(there) > 20
    for title, rows in there.items():
        assert made[title][0] == rows[0], title
        assert len(made[title]) == len(rows), title
        for ours, theirs in zip(made[title], rows, strict=True):
            assert ours[:2] == theirs[:2], title
            assert numbers_of(ours) == numbers_of(theirs), title


def test_the_readme_shows_the_results_of_the_committed_records(committed):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert put_results(readme, page_tables(committed)) == readme


def test_the_page_of_gates_shows_the_study_of_the_committed_records(committed):
    page = (ROOT / "docs" / "gates-study.md").read_text(encoding="utf-8")
    assert put_results(page, page_tables(committed, ("gates",))) == page


def test_the_folder_has_every_kind_of_file_and_nothing_else(report):
    folder, paths = report
    there = {path for path in folder.rglob("*") if path.is_file()}
    assert set(paths) == there
    names = {path.relative_to(folder).as_posix() for path in there}
    figures = {name for name in names if name.startswith("figures/")}
    assert names - figures == {"tables.md", "tables.tex", "report.html"}
    kinds = {re.split(r"-(?=mlp|resnet|deit|gpt2)", Path(name).stem)[0] for name in figures}
    assert kinds == set(ALL_FIGURES)
    assert {name for spec in SECTIONS.values() for name in (*spec.tables, *spec.figures)} | {"path"} == {
        *ALL_TABLES,
        *ALL_FIGURES,
    }


def test_the_committed_picture_is_that_which_is_drawn(report):
    """By what is written in it; the others are not committed."""

    def words(folder):
        with Image.open(folder / "path.png") as picture:
            return picture.text["Description"].splitlines()

    there = words(CARDS / "report" / "figures")
    assert len(there) > 20
    assert words(report[0] / "figures") == there


def test_no_text_shows_what_is_no_number_and_all_show_failures(report):
    for name in ("report.html", "tables.md", "tables.tex"):
        text = html.unescape((report[0] / name).read_text("utf-8"))
        visible = re.sub(r"data:[^\"]*|<style>.*?</style>|<meta[^>]*>", "", text, flags=re.DOTALL)
        assert not re.search(r"\b(nan|inf|None|True|False)\b", visible)
        assert "no such luck" in visible


def test_every_picture_is_whole(report):
    """Nothing touches an edge, where it would be cut off, and no picture is empty."""
    for path in (report[0] / "figures").iterdir():
        pixels = image.imread(path)[..., :3]
        assert min(pixels.shape[:2]) > 150, path
        assert 0.002 < np.mean(np.any(pixels < 0.9, axis=-1)) < 0.75, path
        assert np.all(pixels[[0, -1], :] == 1), path
        assert np.all(pixels[:, [0, -1]] == 1), path


def test_texts_of_pictures_are_legible_and_inside(committed):
    """Of two pictures; the others share what draws them."""
    for section in build_sections(committed, only=("grid", "downstream-verification")):
        for drawn in section.drawings:
            drawn.figure.canvas.draw()
            width, height = drawn.figure.canvas.get_width_height()
            texts = [text for text in drawn.figure.findobj(Text) if text.get_text() and text.get_visible()]
            assert min(text.get_fontsize() for text in texts) >= 9
            for text in (*drawn.figure.texts, *(text for axis in drawn.figure.axes for text in axis.texts)):
                box = text.get_window_extent()
                assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, text.get_text()


def test_the_page_needs_nothing_else(report):
    folder, _ = report
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<img ") == len(list((folder / "figures").iterdir()))
    for attribute in re.findall(r'(?:src|href)="([^"]{0,40})', page):
        assert attribute.startswith(("data:", "#")), attribute
    assert "<script" not in page
    assert "url(" not in page
    targets, identifiers = re.findall(r'href="#([^"]+)"', page), re.findall(r' id="([^"]+)"', page)
    assert targets
    assert set(targets) <= set(identifiers)
    assert len(set(identifiers)) == len(identifiers)
    assert all(len(text) > 20 for text in re.findall(r'<img alt="([^"]*)"', page))
    first = page.partition("<nav")[0]
    assert first.count(" changes accuracy by ") == 3, "the first screen has the conclusions"


def test_the_papers_numbers_stand_beside_ours_and_shortened_data_is_named(report):
    text = (report[0] / "tables.md").read_text("utf-8")
    assert "| 0.85 ± 0.0004 |" in text
    assert "arXiv:2603.21991" in text
    assert "WikiText-2's test split served as training split" in text
    assert "40 of 200 classes" in text


def test_the_same_records_give_the_same_bytes(committed, tmp_path):
    first, second = (build_sections(committed, only=("grid",))[0].drawings[0] for _ in range(2))
    assert first.save(tmp_path).read_bytes() == second.save(tmp_path).read_bytes()


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


# What is written where


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


def test_a_record_cannot_end_the_readmes_results(record_of, data_of):
    hostile = record_of(benchmark=f"x | {END}\n# mine", metric="a|b")
    text = put_results(f"{START}{END}", page_tables(data_of([hostile])))
    assert text.count(END) == 1
    assert "\n# mine" not in text


def test_names_of_records_are_no_paths_formulas_or_tags(record_of, data_of, tmp_path):
    hostile = "../../x | $\\frac$ <b>_{"
    soft = [{"a": 1.5, "b": 1.2}] * 3
    runs = [record_of(benchmark=hostile, metric="$a_$"), record_of(benchmark=hostile, activation="silu")]
    runs.append(record_of(benchmark=hostile, activation="lambda_gelu", hardness=soft))
    written = write_report(data_of(runs), tmp_path / "out" / "report")
    assert all((tmp_path / "out" / "report") in path.parents for path in written)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report"}
    page = (tmp_path / "out" / "report" / "report.html").read_text(encoding="utf-8")
    assert "<b>_{" not in page
    assert len([path for path in written if path.suffix == ".png"]) == 5


def test_failed_runs_are_found_with_the_last_line_of_their_error(tmp_path):
    folder = tmp_path / "mlp-adult" / "gelu-seed0"
    folder.mkdir(parents=True)
    (folder / "error.txt").write_text("Traceback (most recent call last):\n  ...\nValueError: no such luck\n")
    assert failed_runs(tmp_path) == {"mlp-adult/gelu-seed0": "ValueError: no such luck"}


def test_summary_of_a_run_without_and_with_substitution(record_of, tmp_path):
    relu = summarize(record_of(activation="relu", relu_scores=(None,) * 3), tmp_path)
    assert "substituted" not in relu
    hard = [{"a": 2.0}, {"a": 80.0}, {"a": 160.0}]
    text = summarize(record_of(activation="lambda_gelu", harden=True, hardness=hard), tmp_path)
    assert re.search(r"best accuracy 0\.9000 in epoch 2", text)
    assert "0.7000 (-0.1500)" in text
    assert " % of the predictions unchanged" in text
    assert "a 160" in text


# The script


@pytest.fixture
def script(monkeypatch, record_of, tmp_path):
    """Runs scripts/report.py on two runs and a failed one, with more arguments; gives its exit status."""
    for seed in range(2):
        write_record(record_of(seed=seed), tmp_path / "runs" / "mlp-adult" / f"gelu-seed{seed}")
    (tmp_path / "runs" / "mlp-adult" / "relu-seed0").mkdir()
    (tmp_path / "runs" / "mlp-adult" / "relu-seed0" / "error.txt").write_text("OSError: no such luck\n")

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
    printed = capsys.readouterr().out
    assert "| mlp-adult [a] | 0.8500 ± 0.0000 (2 of 3 seeds) |" in printed
    assert f"Written to {tmp_path / 'out'}" in printed
    assert "| mlp-adult [a] | 0.8500 ± 0.0000 (2 of 3 seeds) |" in readme.read_text()
    assert readme.is_symlink()
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "OSError: no such luck" in page
    assert 'id="downstream-zeros"' in page
    assert {path.name for path in (tmp_path / "out" / "figures").iterdir()} >= {"path.png", "downstream-zeros.png"}
    assert not list((tmp_path / "runs").rglob("*.html"))


def test_what_cannot_be_read_is_refused_before_anything_is_written(script, tmp_path, capsys):
    (tmp_path / "paper.json").write_text('{"values": {"mlp-adults": {}}}')
    for option, given, told in (
        ("--paper_values", tmp_path / "paper.json", "ValueError: .*benchmark 'mlp-adults' is unknown; accepted: "),
        ("--downstream", tmp_path / "runs", "FileNotFoundError: .*no measurement below"),
    ):
        assert script("--output_dir", tmp_path / "out", option, given) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert re.match(told, line)
    assert not (tmp_path / "out").exists()
