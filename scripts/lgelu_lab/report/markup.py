"""One model of a table, and its Markdown, LaTeX and HTML.

Texts are plain: what is special in a format is escaped when it is rendered, and mathematical signs
become LaTeX's own.
"""

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from lgelu_lab.report.numbers import MISSING, NONE

TONES = ("", "better", "worse", "missing", "warning")


@dataclass(frozen=True)
class Cell:
    """A text and how HTML shows it: one of TONES."""

    text: str
    tone: str = ""

    def __post_init__(self) -> None:
        if self.tone not in TONES:
            raise ValueError(f"unknown tone {self.tone!r}; accepted: {', '.join(map(repr, TONES))}")


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
        in_groups: equal texts in the first column name groups of rows; HTML and LaTeX give each a line.

    Raises ValueError where a row has another number of cells than the header.
    """

    key: str
    title: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
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
        return [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in self.rows]


def missing_row(benchmark: str, label: str, columns: int) -> tuple[Cell | str, ...]:
    """A row that says that its runs are not there."""
    return (benchmark, Cell(label, "missing"), Cell(MISSING, "missing"), *(Cell(NONE, "missing"),) * (columns - 3))


def to_markdown(table: Table, *, level: int = 0) -> str:
    """The title in bold (or as a heading of that level), caption, rows and notes."""
    title = f"{'#' * level} {table.title}" if level else f"**{table.title}**"
    lines = ["| " + " | ".join(map(_markdown_text, table.header)) + " |"]
    lines.append("|" + "".join(f" {'---' if i < table.text_columns else '---:'} |" for i in range(len(table.header))))
    lines += ["| " + " | ".join(map(_markdown_text, row)) + " |" for row in table.texts]
    parts = [title, table.caption, "\n".join(lines), *map(_markdown_text, table.notes)]
    return "\n\n".join(part for part in parts if part)


def to_latex(table: Table) -> str:
    """A `table` environment for an article that loads booktabs and array."""
    size = r"\scriptsize" if len(table.header) > 6 else r"\small"
    start = int(table.in_groups)
    body = [" & ".join(_latex_heads(table)[start:]) + r" \\", r"\midrule"]
    for name, rows in groupby(table.texts, key=lambda row: row[0] if table.in_groups else ""):
        if name:
            body += [rf"\multicolumn{{{len(table.header) - 1}}}{{@{{}}l}}{{\textbf{{{latex_text(name)}}}}} \\"]
        body += [" & ".join(map(latex_text, row[start:])) + r" \\" for row in rows] + [r"\addlinespace"]
    body.pop()
    notes = [rf"\par\smallskip\parbox{{\linewidth}}{{\footnotesize {latex_text(note)}}}" for note in table.notes]
    return "\n".join(
        (
            r"\begin{table}[htbp]",
            r"\centering",
            rf"\caption{{{latex_text(f'{table.title}. {table.caption}'.strip())}}}",
            rf"\label{{tab:{table.key}}}",
            size,
            r"\setlength{\tabcolsep}{3pt}",
            rf"\fittable{{\begin{{tabular}}{{@{{}}{_latex_columns(table)}@{{}}}}",
            r"\toprule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            *notes,
            r"\end{table}",
        )
    )


def to_html(table: Table) -> str:
    """A figure with a caption and a table in a box of its own, which scrolls where the table is wide."""
    start = int(table.in_groups)
    head = "".join(
        f'<th scope="col"{_html_class(table, column)}>{html_text(text)}</th>'
        for column, text in enumerate(table.header)
        if column >= start
    )
    bodies = [
        "<tbody>\n" + (_html_group(table, name) if table.in_groups else "") + "\n".join(rows) + "\n</tbody>"
        for name, rows in _html_rows_by_group(table, start)
    ]
    notes = "".join(f"<p>{html_text(note)}</p>" for note in table.notes)
    return (
        f'<figure class="table" id="table-{html.escape(table.key)}"><figcaption><b>{html_text(table.title)}.</b> '
        f'{html_text(table.caption)}</figcaption>\n<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{html.escape(table.title)}"><table>\n<thead><tr>{head}</tr></thead>\n'
        + "\n".join(bodies)
        + f'\n</table></div>\n<div class="notes">{notes}</div></figure>'
    )


def html_text(text: str) -> str:
    """Escaped, with V_λ and ρ_S set as the symbols they are."""
    return re.sub(r"\b([Vρ])_(\w)", r"\1<sub>\2</sub>", html.escape(text))


def latex_text(text: str) -> str:
    """Escaped; mathematical signs become LaTeX's own, so that pdflatex sets them with its standard fonts."""
    return "".join(_LATEX.get(piece, piece) for piece in _LATEX_PIECES.split(text))


def _latex_heads(table: Table) -> list[str]:
    """One word a line, so that a column is as wide as its numbers."""
    heads = []
    for column, text in enumerate(table.header):
        words = [latex_text(word) for word in text.split(" ")]
        side = "l" if column < table.text_columns else "r"
        several = len(words) > 1 and column not in table.wide_columns
        stacked = rf"\begin{{tabular}}[b]{{@{{}}{side}@{{}}}}" + r"\\".join(words) + r"\end{tabular}"
        heads.append(stacked if several else " ".join(words))
    return heads


def _latex_columns(table: Table) -> str:
    share = 0.8 / len(table.wide_columns) if table.wide_columns else 0
    wide = rf">{{\raggedright\arraybackslash}}p{{{share:.2f}\linewidth}}"
    letters = ["l" if i < table.text_columns else "r" for i in range(len(table.header))]
    columns = [wide if i in table.wide_columns else letter for i, letter in enumerate(letters)]
    return "".join(columns[int(table.in_groups) :])


def _html_rows_by_group(table: Table, start: int) -> list[tuple[str, list[str]]]:
    """[(name of the group, its rows)]; all rows are one group where the table has none."""
    names = [text[0] if table.in_groups else "" for text in table.texts]
    grouped = groupby(zip(names, table.rows, strict=True), key=lambda pair: pair[0])
    return [(name, [_html_row(table, row, start) for _, row in rows]) for name, rows in grouped]


def _html_group(table: Table, name: str) -> str:
    columns = len(table.header) - 1
    return f'<tr class="group"><th colspan="{columns}" scope="rowgroup"><span>{html_text(name)}</span></th></tr>\n'


def _html_row(table: Table, row: Sequence[Cell | str], start: int) -> str:
    cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]
    shown = [f'<th scope="row"{_html_class(table, start, cells[start].tone)}>{html_text(cells[start].text)}</th>']
    shown += [
        f"<td{_html_class(table, column, cells[column].tone)}>{html_text(cells[column].text)}</td>"
        for column in range(start + 1, len(cells))
    ]
    return f"<tr>{''.join(shown)}</tr>"


def _html_class(table: Table, column: int, tone: str = "") -> str:
    kind = "wide" if column in table.wide_columns else "" if column < table.text_columns else "number"
    names = " ".join(name for name in (kind, tone) if name)
    return f' class="{names}"' if names else ""


def _markdown_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


LATEX_PREAMBLE = r"""% In an article: \usepackage{booktabs,array}, then \input this file. With
% \usepackage{graphicx} as well, tables that are wider than the line are scaled to it.
\makeatletter
\newsavebox{\fittablebox}
\@ifundefined{resizebox}{\providecommand{\fittable}[1]{#1}}{\providecommand{\fittable}[1]{%
  \sbox{\fittablebox}{#1}%
  \ifdim\wd\fittablebox>\linewidth\resizebox{\linewidth}{!}{\usebox{\fittablebox}}\else\usebox{\fittablebox}\fi}}
\makeatother
"""
"""What a file of `to_latex` tables begins with."""

_LATEX: dict[str, str] = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "<": "$<$", ">": "$>$"},
    "[": "{[}",  # after the end of a row it would begin an argument
    **{"λ": r"$\lambda$", "λ₀": r"$\lambda_0$", "V_λ": r"$V_\lambda$", "ρ_S": r"$\rho_S$", "ρ": r"$\rho$"},
    **{"Δ": r"$\Delta$", "ε": r"$\varepsilon$", "β": r"$\beta$", "Φ": r"$\Phi$", "±": r"$\pm$", "×": r"$\times$"},
    **{"−": "$-$", "–": "--", "→": r"$\rightarrow$", "≤": r"$\leq$", "≥": r"$\geq$", "·": r"$\cdot$"},
    **{"κ": r"$\kappa$", "∞": r"$\infty$", "÷": r"$\div$", "²": r"$^2$"},
    **{"†": r"$\dagger$", "‡": r"$\ddagger$", "…": r"\ldots{}", "“": "``", "”": "''", "’": "'", "\n": " "},
}
_LATEX_PIECES = re.compile("(" + "|".join(re.escape(sign) for sign in sorted(_LATEX, key=len, reverse=True)) + ")")

RENDERERS: dict[str, Callable[[Table], str]] = {"md": to_markdown, "tex": to_latex, "html": to_html}
"""File suffix → how a table is written in such a file."""
