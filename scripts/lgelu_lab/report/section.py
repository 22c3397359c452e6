"""One part of the report."""

from dataclasses import dataclass

from lgelu_lab.report.figures.drawing import Drawing
from lgelu_lab.report.markup import Table

NONE_THERE = "No run of this study is there yet: missing, not zero."


@dataclass(frozen=True)
class Section:
    """One part of the report: a title, some sentences, figures, and tables."""

    key: str
    title: str
    text: str
    drawings: tuple[Drawing, ...] = ()
    tables: tuple[Table, ...] = ()
