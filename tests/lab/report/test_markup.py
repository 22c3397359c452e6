import dataclasses
import html
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from lgelu_lab.report.markup import (
    LATEX_PREAMBLE,
    TEMPLATES,
    TONES,
    Cell,
    Table,
    html_text,
    latex_text,
    missing_row,
    to_latex,
    to_markdown,
)

NASTY = "50 % & 3_a # {x} ~ ^ \\ $1 <b> | \"q\" 'p'"
SIGNS = "λ₀ λ V_λ ρ_S Δ ± − – → × ≤ ≥ † ‡ β ε Φ · …"


@pytest.fixture
def table():
    rows = (
        ("first", NASTY, Cell("−0.01", "worse")),
        ("first", SIGNS, "1"),
        missing_row(("second", "all"), 3),
    )
    return Table("key", f"Title {NASTY}", f"Caption {SIGNS}", ("A", "B & C", "V_λ"), rows, ("Note | one",), 2, (1,))


def markdown_cells(line):
    return [
        html.unescape(cell.strip().replace("\\|", "|").replace("\\\\", "\\"))
        for cell in re.split(r"(?<!\\)\|", line)[1:-1]
    ]


def test_markdown_comes_apart_into_the_same_cells(table):
    lines = [line for line in to_markdown(table).splitlines() if line.startswith("| ")]
    header, rule, *rows = map(markdown_cells, lines)
    assert header == list(table.header)
    assert rule == ["---", "---", "---:"]
    assert rows == table.texts
    assert to_markdown(table, level=3).startswith("### Title")


def to_html(table):
    section = {"key": "s", "title": "S", "text": "", "drawings": (), "tables": [table]}
    words = {"title": "T", "conclusions": [], "basis": "", "hero": [], "pictures": {}}
    page = TEMPLATES.get_template("page.html.j2").render(sections=[section], folded_from=24, full_width=8, **words)
    return re.search(r"<main>.*</main>", page, flags=re.DOTALL)[0]


class Cells(HTMLParser):
    """The texts of th and td, row by row, as a browser reads them, and every class."""

    def __init__(self):
        super().__init__()
        self.rows, self.classes, self.open = [], [], []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.classes += dict(attributes).get("class", "").split()
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def test_html_comes_apart_into_the_same_cells_and_closes_what_it_opens(table):
    parser = Cells()
    parser.feed(to_html(table))
    assert parser.open == []
    plain = [[text.replace("V_λ", "Vλ").replace("ρ_S", "ρS") for text in row] for row in table.texts]
    assert parser.rows == [["A", "B & C", "Vλ"], *plain]
    assert {"worse", "missing", "number", "wide", "scroll"} <= set(parser.classes)


def test_html_gives_each_group_a_line_and_no_column(table):
    parser = Cells()
    parser.feed(to_html(dataclasses.replace(table, in_groups=True)))
    assert parser.open == []
    assert [row if len(row) == 1 else row[-1] for row in parser.rows] == [
        "Vλ",
        ["first"],
        "−0.01",
        "1",
        ["second"],
        "missing",
    ]
    assert {len(row) for row in parser.rows} == {1, 2}
    assert parser.classes.count("group") == 2


def test_html_folds_a_long_table(table):
    assert "<details>" not in to_html(table)
    assert "<details><summary>30 rows</summary>" in to_html(dataclasses.replace(table, rows=table.rows * 10))


HOSTILE = "x | y\n<!-- end of results --> <script>`a` [here](http://x) ![p](q)\\"


def test_a_text_from_a_record_cannot_leave_its_cell_or_its_table():
    table = Table("k", HOSTILE, HOSTILE, ("A", "B"), ((HOSTILE, "1"),), (HOSTILE,))
    markdown = to_markdown(table)
    assert "<" not in markdown
    assert "](" not in markdown
    assert len([line for line in markdown.splitlines() if line.startswith("| ")]) == 3
    assert re.findall(r"(?<!\\)`", markdown) == []
    page = to_html(table)
    assert "<script" not in page
    assert "<!--" not in page
    parser = Cells()
    parser.feed(page)
    assert parser.rows[-1] == [HOSTILE, "1"]


def test_symbols_get_their_index_and_text_is_escaped():
    assert html_text("drift V_λ < ρ_S") == "drift V<sub>λ</sub> &lt; ρ<sub>S</sub>"
    assert html_text("max_steps") == "max_steps"
    assert html.unescape(html_text(NASTY)) == NASTY


def test_latex_escapes_everything_and_writes_signs_as_commands():
    assert latex_text("50 % & a_b #1 {x} $2") == r"50 \% \& a\_b \#1 \{x\} \$2"
    assert latex_text("~^\\") == r"\textasciitilde{}\textasciicircum{}\textbackslash{}"
    assert latex_text("λ₀ V_λ −1 ± 2 → †") == r"$\lambda_0$ $V_\lambda$ $-$1 $\pm$ 2 $\rightarrow$ $\dagger$"
    assert latex_text(SIGNS).isascii()


def test_latex_has_as_many_columns_in_every_row_as_it_declares(table):
    text = to_latex(table)
    body = re.search(r"\\midrule\n(.*)\\bottomrule", text, flags=re.DOTALL)[1]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 3
    assert [len(re.findall(r"(?<!\\)&", row)) for row in rows] == [2, 2, 2]
    assert r"\begin{tabular}{llr}" in text
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert len(re.findall(r"\\begin\{(\w+)\}", text)) == len(re.findall(r"\\end\{(\w+)\}", text))


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_compiles_in_a_plain_article(table, tmp_path):
    rows = ((*table.rows[0][:1], "[a] & b", "1"), *table.rows)
    table = dataclasses.replace(table, rows=rows)
    (tmp_path / "tables.tex").write_text(LATEX_PREAMBLE + to_latex(table), encoding="utf-8")
    article = r"\documentclass{article}\usepackage{booktabs,adjustbox}\begin{document}\input{tables}\end{document}"
    (tmp_path / "article.tex").write_text(article, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "article.tex"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stdout[-2000:]
    assert (tmp_path / "article.pdf").stat().st_size > 5000


def test_a_row_of_another_length_and_an_unknown_tone_are_refused():
    with pytest.raises(ValueError, match=r"table 'k': 2 columns, but a row of 1"):
        Table("k", "t", "c", ("a", "b"), (("x",),))
    with pytest.raises(ValueError, match="unknown tone 'pink'; accepted: '', 'better'"):
        Cell("x", "pink")
    assert len(TONES) == len(set(TONES))
