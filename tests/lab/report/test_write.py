import html
import re

import pytest
from lgelu_lab.report.paper_values import NOT_AT_HAND, PaperValues
from lgelu_lab.report.write import failed_runs, readme_tables, summarize, write_report

HARD = [{"a": 1.0, "b": 2.0}, {"a": 90.0, "b": 80.0}, {"a": 160.0, "b": 160.0}]
SOFT = [{"a": 1.5, "b": 1.2}, {"a": 1.6, "b": 1.4}, {"a": 1.7, "b": 1.5}]


@pytest.fixture(scope="module")
def runs(record_of):
    """A bit of everything: baselines, learned, hardened, swapped early, grid, another activation, perplexity."""
    found = [record_of(seed=seed) for seed in range(3)]
    found += [
        record_of(activation="lambda_gelu", init_mode=mode, hardness=SOFT, seed=seed)
        for mode in ("uniform", "increasing")
        for seed in range(2)
    ]
    found.append(record_of(activation="lambda_gelu", harden=True, hardness=HARD))
    early = record_of(relu_scores=(0.5, None, None))
    early.config["relufication"] = True
    found.append(early)
    found.append(record_of(activation="silu"))
    point = record_of(activation="lambda_gelu", hardness=SOFT, benchmark="mlp-fmnist", name="grid/mlp-fmnist/x-seed0")
    point.config.update(temperature=0.3, hardness_lr_multiplier=6.0)
    found += [point, record_of(benchmark="mlp-fmnist", name="grid/mlp-fmnist/gelu-seed0")]
    perplexity = {"metric": "perplexity", "greater_is_better": False, "benchmark": "gpt2-wikitext2"}
    found.append(record_of(scores=(90.0, 30.0, 31.0), relu_scores=(99.0, 95.0, 92.0), **perplexity))
    return found


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    """The folder of a report without the paper's values, and what `write_report` returned."""
    folder = tmp_path_factory.mktemp("report") / "made"
    return folder, write_report(runs, folder, failed={"mlp-adult/relu-seed0": "ValueError: no such luck"})


@pytest.fixture(scope="module")
def report_beside_the_paper(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    values = {"best_validation_score": (0.1234, 0.5), "substituted": (0.4321, None)}
    gelu = [run for run in runs if run.name == "mlp-adult/gelu-seed0"][:1]
    return folder, write_report(gelu, folder, paper=PaperValues({"mlp-adult": {"GELU": values}}))


def texts(folder):
    page, markdown, latex = ((folder / name).read_text("utf-8") for name in ("report.html", "tables.md", "tables.tex"))
    return html.unescape(page), markdown, latex


def test_the_folder_has_every_kind_of_file_and_nothing_else(report):
    folder, paths = report
    there = {path for path in folder.rglob("*") if path.is_file()}
    assert set(paths) == there
    names = {path.relative_to(folder).as_posix() for path in there}
    figures = {name for name in names if name.startswith("figures/")}
    assert names - figures == {"tables.md", "tables.tex", "report.html"}
    kinds = ("glance", "trajectories-mlp-adult", "hardness-mlp-adult", "substitution-mlp-adult", "grid-mlp-fmnist")
    assert {f"figures/{kind}.{end}" for kind in kinds for end in ("png", "svg")} <= figures
    assert {"figures/related-mlp-adult.png", "figures/substitution-gpt2-wikitext2.svg"} <= figures


def test_no_text_shows_what_is_no_number_and_all_show_failures(report):
    for text in texts(report[0]):
        visible = re.sub(r"data:[^\"]*|<style>.*?</style>|<meta[^>]*>", "", text, flags=re.DOTALL)
        assert not re.search(r"\b(nan|inf|None|True|False)\b", visible)
        assert "no such luck" in visible


def test_the_same_records_give_the_same_bytes(report, runs, tmp_path):
    folder, paths = report
    write_report([run for run in runs if run.config["benchmark"] == "gpt2-wikitext2"], tmp_path)
    same = [path.relative_to(folder) for path in paths if "gpt2" in path.name]
    assert len(same) == 4
    assert [(tmp_path / name).read_bytes() == (folder / name).read_bytes() for name in same] == [True] * 4


def test_the_page_needs_nothing_else(report):
    folder, _ = report
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<img ") == len(list((folder / "figures").glob("*.svg")))
    for attribute in re.findall(r'(?:src|href)="([^"]{0,40})', page):
        assert attribute.startswith(("data:", "#")), attribute
    assert "<script" not in page
    assert "url(" not in page
    targets = re.findall(r'href="#([^"]+)"', page)
    identifiers = re.findall(r' id="([^"]+)"', page)
    assert targets
    assert set(targets) <= set(identifiers)
    assert len(set(identifiers)) == len(identifiers)
    assert all(len(text) > 20 for text in re.findall(r'<img alt="([^"]*)"', page))


def test_without_the_papers_values_every_format_says_so_and_has_no_column_for_them(report):
    for text in texts(report[0])[:2]:
        assert NOT_AT_HAND in text
        assert ", paper" not in text
    assert "were not at hand" in texts(report[0])[2]


def test_with_the_papers_values_they_stand_beside_ours(report_beside_the_paper):
    page, markdown, latex = texts(report_beside_the_paper[0])
    for text in (page, markdown):
        assert "0.1234 ± 0.5000" in text
        assert NOT_AT_HAND not in text
    assert r"0.1234 $\pm$ 0.5000" in latex
    assert all("0.4321" in text for text in (page, markdown, latex))


def test_records_of_the_grid_alone_make_a_report(runs, tmp_path):
    write_report([run for run in runs if run.name.startswith("grid/")], tmp_path)
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        *("grid-mlp-fmnist.png", "grid-mlp-fmnist.svg"),
    ]


def test_a_report_on_nothing_or_on_a_run_twice_is_refused_and_writes_nothing(runs, tmp_path):
    with pytest.raises(ValueError, match="at least one record"):
        write_report([], tmp_path / "out")
    with pytest.raises(ValueError, match="more than one record of a seed"):
        write_report([*runs, runs[0]], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_readme_has_the_main_tables_in_markdown(runs):
    text = readme_tables(runs)
    for part in ("Four ways to a ReLU network", "Table I)", "in the last epoch", "| Recipe |"):
        assert part in text
    assert "grid" in text  # the basis names it
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    assert all(line.endswith("|") for line in rows)


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
    assert "a 160" in text


def test_the_papers_tables_say_of_every_other_run_that_it_is_missing(record_of):
    lines = [line for line in readme_tables([record_of()]).splitlines() if line.startswith("| mlp-adult |")]
    there = [line for line in lines if "missing" not in line]
    assert len(there) == 3  # Table I, Table II, the basis
    assert all(line.startswith("| mlp-adult | GELU |") for line in there[:2])
    assert sum(line.startswith("| mlp-adult | ReLU | missing | –") for line in lines) == 1
    assert sum(line.startswith("| mlp-adult | λ-GELU uniform, hardened | missing | –") for line in lines) == 1
