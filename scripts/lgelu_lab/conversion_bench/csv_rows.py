"""Rows of a CSV file that grows as they are measured."""

import csv
from collections.abc import Mapping
from pathlib import Path


def append_row(path: Path, row: Mapping[str, str | float | int]) -> None:
    """Add a row; a new file gets its header first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows, as text; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
