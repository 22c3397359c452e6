"""One model of a table, how it is specified, and its Markdown, HTML and LaTeX.

Texts are plain, and may come from records that anybody wrote: what is special in a format is escaped when it is
rendered, and mathematical signs become LaTeX's own.
"""

import html
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jinja2
import pandas as pd

from lgelu_lab.report.frames import ReportData
from lgelu_lab.report.numbers import MISSING, NONE
from lgelu_lab.report.paper import Notes, note_lines

TONES = ("", "better", "worse", "missing", "warning")


@dataclass(frozen=True)
class Cell:
    """A text and how HTML shows it: one of TONES."""

    text: str
    tone: str = ""

    def __post_init__(self) -> None:
        if self.tone not in TONES:
            raise ValueError(f"unknown tone {self.tone!r}; accepted: {', '.join(map(repr, TONES))}")


Row = tuple[Cell | str, ...]


@dataclass(frozen=True)
class Table:
    """A table with a title, a sentence on how to read it, and notes below.

    Args:
        key: names it in links and LaTeX labels.
        title: without a full stop.
        caption: plain sentences.
        header: one text a column.
        rows: as many cells each; a plain str is a cell without a tone.
        notes: one line each.
        text_columns: how many columns on the left are words; the others are aligned as numbers.
        wide_columns: the columns whose texts are long enough to be broken over lines.
        in_groups: equal texts in the first column name groups of rows; HTML gives each a line.

    Raises ValueError where a row has another number of cells than the header.
    """

    key: str
    title: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    text_columns: int = 2
    wide_columns: tuple[int, ...] = ()
    in_groups: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"table {self.key!r}: {len(self.header)} columns, but a row of {len(row)}: {row}")

    @property
    def texts(self) -> list[list[str]]:
        """The rows without their tones."""
        return [[cell.text for cell in row] for row in self.cells]

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows, every entry a Cell."""
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]

    @property
    def groups(self) -> list[tuple[str, list[list[Cell]]]]:
        """[(name of a group, its rows)]; all rows are one group without a name where the table has none."""
        grouped = groupby(self.cells, key=lambda row: row[0].text if self.in_groups else "")
        return [(name, list(rows)) for name, rows in grouped]


@dataclass(frozen=True)
class Column:
    """A heading, and what stands under it: (what a row is made of, the table's notes) → text."""

    heading: str
    cell: Callable[[Any, Notes], Cell | str]


Group = tuple[tuple[str, ...], Any]
"""(the texts of a row's first columns, what its other columns read); None for what is not there."""


@dataclass(frozen=True)
class TableSpec:
    """How a table is made of a report's data.

    Args:
        title: without a full stop.
        caption: how to read it, or a function of the data that says so.
        rows: the data → its groups, one a row.
        columns: those behind the head's, or a function of the data that gives them.
        head: headings of the first columns, whose texts are a group's own.
        notes: (data, rows) → lines above those on what is not as in the paper.
        text_columns, wide_columns, in_groups: as in Table.
    """

    title: str
    caption: str | Callable[[ReportData], str]
    rows: Callable[[ReportData], Iterable[Group]]
    columns: tuple[Column, ...] | Callable[[ReportData], tuple[Column, ...]]
    head: tuple[str, ...] = ("Benchmark", "Activation")
    notes: Callable[[ReportData, Sequence[Row]], Iterable[str]] = lambda data, rows: ()
    text_columns: int = 2
    wide_columns: tuple[int, ...] = ()
    in_groups: bool = True


def build_table(key: str, spec: TableSpec, data: ReportData) -> Table:
    """The table of one specification; without rows where the data has nothing for it."""
    columns = spec.columns(data) if callable(spec.columns) else spec.columns
    header = (*spec.head, *(column.heading for column in columns))
    notes: Notes = {}
    rows = tuple(
        missing_row(head, len(header)) if seeds is None else (*head, *(column.cell(seeds, notes) for column in columns))
        for head, seeds in spec.rows(data)
    )
    return Table(
        key=key,
        title=spec.title,
        caption=spec.caption(data) if callable(spec.caption) else spec.caption,
        header=header,
        rows=rows,
        notes=(*spec.notes(data, rows), *note_lines(notes)),
        text_columns=spec.text_columns,
        wide_columns=spec.wide_columns,
        in_groups=spec.in_groups,
    )


def missing_row(head: Sequence[str], columns: int) -> Row:
    """A row that says that what it is made of is not there."""
    first, *others = head
    called = [Cell(text, "missing") for text in (*others, MISSING)]
    return (first, *called, *(Cell(NONE, "missing"),) * (columns - 1 - len(called)))


def to_markdown(table: Table, *, level: int = 0) -> str:
    """The title in bold (or as a heading of that level), caption, rows and notes."""
    return TEMPLATES.get_template("table.md.j2").render(table=table, level=level).strip()


def to_latex(table: Table) -> str:
    """A `table` environment for an article that loads booktabs and adjustbox: scaled down where it is too large."""
    frame = pd.DataFrame(
        [[latex_text(text) for text in row] for row in table.texts], columns=[latex_text(text) for text in table.header]
    )
    tabular = frame.to_latex(
        index=False,
        escape=False,
        column_format="".join("l" if i < table.text_columns else "r" for i in range(len(table.header))),
    )
    notes = [rf"\par\smallskip{{\footnotesize {latex_text(note)}\par}}" for note in table.notes]
    return "\n".join(
        (
            r"\begin{table}[htbp]\centering",
            rf"\caption{{{latex_text(f'{table.title}. {table.caption}'.strip())}}}\label{{tab:{table.key}}}",
            r"\begin{adjustbox}{max width=\linewidth, max totalheight=0.8\textheight}",
            tabular + r"\end{adjustbox}",
            *notes,
            r"\end{table}",
        )
    )


def html_text(text: str) -> str:
    """Escaped, with V_λ and ρ_S set as the symbols they are."""
    return re.sub(r"\b([Vρ])_(\w)", r"\1<sub>\2</sub>", html.escape(text))


def markdown_text(text: str) -> str:
    """On one line, with nothing in it that ends a cell, opens a tag, a comment or code, or makes a link."""
    text = re.sub(r"\s+", " ", text).replace("\\", "\\\\").replace("|", "\\|").replace("`", "\\`")
    return text.replace("<", "&lt;").replace("](", "]\\(")


def latex_text(text: str) -> str:
    """Escaped; mathematical signs become LaTeX's own, so that pdflatex sets them with its standard fonts."""
    return "".join(_LATEX.get(piece, piece) for piece in _LATEX_PIECES.split(text))


LATEX_PREAMBLE = "% In an article: \\usepackage{booktabs,adjustbox}, then \\input this file.\n"
"""What a file of `to_latex` tables begins with."""

_LATEX: dict[str, str] = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "<": "$<$", ">": "$>$"},
    "[": "{[}",  # after the end of a row it would begin an argument
    **{"λ": r"$\lambda$", "λ₀": r"$\lambda_0$", "V_λ": r"$V_\lambda$", "ρ_S": r"$\rho_S$", "ρ": r"$\rho$"},
    **{"Δ": r"$\Delta$", "ε": r"$\varepsilon$", "β": r"$\beta$", "Φ": r"$\Phi$", "±": r"$\pm$", "×": r"$\times$"},
    **{"−": "$-$", "–": "--", "→": r"$\rightarrow$", "≤": r"$\leq$", "≥": r"$\geq$", "·": r"$\cdot$"},
    **{"κ": r"$\kappa$", "∞": r"$\infty$", "÷": r"$\div$", "²": r"$^2$", "é": r"\'e", "μ": r"$\mu$"},
    **{"†": r"$\dagger$", "‡": r"$\ddagger$", "…": r"\ldots{}", "“": "``", "”": "''", "’": "'", "\n": " "},
}
_LATEX_PIECES = re.compile("(" + "|".join(re.escape(sign) for sign in sorted(_LATEX, key=len, reverse=True)) + ")")

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("lgelu_lab.report"),
    autoescape=lambda name: bool(name) and ".html" in name,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""The templates beside this file; those of HTML escape what they are given."""

TEMPLATES.filters["md"] = markdown_text
TEMPLATES.filters["words"] = lambda text: jinja2.utils.markupsafe.Markup(html_text(text))
