"""One model of a table, how it is specified, and its Markdown.

Texts are plain, and may come from records that anybody wrote: what is special in a format is escaped when a table is
rendered.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import pandas as pd

from lgelu_lab.report.frames import ReportData, seed_count
from lgelu_lab.report.numbers import MISSING, NONE, Show, mean_and_deviation, score_text
from lgelu_lab.report.paper import Notes, note_lines

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table with a title, a sentence on how to read it, and notes below.

    Args:
        title: without a full stop.
        caption: plain sentences.
        header: one text a column.
        rows: as many texts each.
        notes: one line each.
        text_columns: how many columns on the left are words; the others are aligned as numbers.
    """

    title: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    text_columns: int = 2


@dataclass(frozen=True)
class Column:
    """A heading, and what stands under it: (what a row is made of, the table's notes) → text."""

    heading: str
    cell: Callable[[Any, Notes], str]


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
        text_columns: as in Table.
    """

    title: str
    caption: str | Callable[[ReportData], str]
    rows: Callable[[ReportData], Iterable[Group]]
    columns: tuple[Column, ...] | Callable[[ReportData], tuple[Column, ...]]
    head: tuple[str, ...] = ("Benchmark", "Activation")
    notes: Callable[[ReportData, Sequence[Row]], Iterable[str]] = lambda data, rows: ()
    text_columns: int = 2


def seeds_text(seeds: pd.DataFrame | None, key: str = "score") -> str:
    """`score_text` of a column of runs or measurements; a dash where there are none."""
    if seeds is None or not len(seeds):
        return NONE
    first = seeds.iloc[0]
    samples = next(filter(None, map(first.get, ("evaluated_rows", "eval_samples", "samples", "judged"))), None)
    return score_text(first["metric"], list(seeds[key]), samples)


def score_column(heading: str, key: str) -> Column:
    """A column of `seeds_text`."""
    return Column(heading, lambda seeds, notes: seeds_text(seeds, key))


def mean_column(heading: str, key: str, show: Show) -> Column:
    """A column of `mean_and_deviation`."""
    return Column(heading, lambda seeds, notes: mean_and_deviation(list(seeds[key]), show))


SEEDS_COLUMN = Column("Seeds", lambda seeds, notes: seed_count(seeds["seed"]))


def build_table(spec: TableSpec, data: ReportData) -> Table:
    """The table of one specification; without rows where the data has nothing for it."""
    columns = spec.columns(data) if callable(spec.columns) else spec.columns
    header = (*spec.head, *(column.heading for column in columns))
    notes: Notes = {}
    rows = tuple(
        (*head, *(column.cell(seeds, notes) for column in columns))
        if seeds is not None
        else (*head, MISSING, *(NONE,) * (len(columns) - 1))  # what it is made of is not there
        for head, seeds in spec.rows(data)
    )
    caption = spec.caption(data) if callable(spec.caption) else spec.caption
    said = (*spec.notes(data, rows), *note_lines(notes))
    return Table(spec.title, caption, header, rows, said, spec.text_columns)


def to_markdown(table: Table, *, level: int = 0) -> str:
    """The title in bold (or as a heading of that level), caption, rows and notes."""
    return TEMPLATES.get_template("table.md.j2").render(table=table, level=level).strip()


def markdown_text(text: str) -> str:
    """On one line, with nothing in it that ends a cell, opens a tag, a comment or code, or makes a link."""
    text = re.sub(r"\s+", " ", text).replace("\\", "\\\\").replace("|", "\\|").replace("`", "\\`")
    return text.replace("<", "&lt;").replace("](", "]\\(")


TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("lgelu_lab.report"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
"""The templates beside this file."""

TEMPLATES.filters["md"] = markdown_text
