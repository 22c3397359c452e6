"""Numbers and tables as reports, cards and pages show them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NONE = "–"
"""The sign for a number that does not apply, or was not measured. It is never a zero."""

_DIGITS = {"accuracy": 4, "perplexity": 2}


def score(metric: str, value: float | None) -> str:
    """A score with the digits that fit the metric."""
    return NONE if value is None else f"{value:.{_DIGITS.get(metric, 4)}f}"


def significant(value: float | None) -> str:
    """Three significant digits."""
    if value is not None and not math.isfinite(value):
        return "not finite"
    return NONE if value is None else f"{value:.3g}"


def finite_or_none(values: Any) -> Any:
    """The same values, in nested mappings and lists, with None for numbers that are not finite, which JSON lacks."""
    if isinstance(values, Mapping):
        return {name: finite_or_none(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite_or_none(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def percent(fraction: float) -> str:
    """A share of predictions; 99.996 % must not be read as all of them."""
    return "100 %" if fraction == 1 else f"{min(fraction, 0.9999):.2%}".replace("%", " %")


RELATIVE_ERROR = "relative error (share of squares)"
DETECTION = "distance of scores and boxes"


def counted(number: int, noun: str) -> str:
    """ "1 row", "1,200 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def quoted(names: Iterable[str]) -> str:
    """Names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int) -> list[str]:
    """The lines of a table for a terminal, columns aligned as in `markdown_table`."""
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = "<" * text_columns + ">" * len(header)
    return [
        "  ".join(f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths, strict=False)).rstrip()
        for row in table
    ]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int) -> str:
    """A table whose first columns are words; the other columns are numbers, aligned right. A cell is on one line."""
    lines = [f"| {' | '.join(header)} |"]
    lines.append("|" + "".join(" --- |" if i < text_columns else " ---: |" for i in range(len(header))))
    cells = ([text.replace("|", "\\|").replace("\n", " ") for text in row] for row in rows)
    lines += [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join(lines)
