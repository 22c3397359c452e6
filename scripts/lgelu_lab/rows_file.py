"""Measured rows in a CSV file, which are appended as they are measured; a rerun finds what is there."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pandas as pd


class RowsFile:
    """A CSV file that rows of one kind are appended to as they are measured.

    Args:
        path: of the file, which need not be there.
        columns: of a row, in their order.
        key: of these, what says which row was asked for; the others are what came out, and on what.
        fixed: cells of every row that is asked for or appended.

    Raises ValueError where the file has other columns, or a line that is cut off.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        columns: Sequence[str],
        key: Sequence[str],
        fixed: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self.path, self.columns, self.key, self.fixed = Path(path), tuple(columns), tuple(key), fixed
        there = read_rows(self.path, self.columns)[list(self.key)] if self.path.exists() else pd.DataFrame()
        self._keys = set(there.itertuples(index=False, name=None))

    def __contains__(self, asked: Mapping[str, object]) -> bool:
        """Whether there is a row of this key; it may be a whole row."""
        whole = {**asked, **self.fixed}
        return tuple(str(whole[name]) for name in self.key) in self._keys

    def append(self, row: Mapping[str, object]) -> None:
        """Write it at once, so that an interruption loses nothing; a cell that it lacks is empty."""
        whole = {**dict.fromkeys(self.columns, ""), **row, **self.fixed}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists() or self.path.stat().st_size == 0
        frame = pd.DataFrame([whole], columns=self.columns)
        frame.to_csv(self.path, mode="a", header=is_new, index=False, lineterminator="\n")
        self._keys.add(tuple(str(whole[name]) for name in self.key))


def read_rows(path: str | os.PathLike, columns: Sequence[str]) -> pd.DataFrame:
    """The file's rows, all cells as texts; raise ValueError where it has other columns or a line that is cut off."""
    text = Path(path).read_text(encoding="utf-8")
    header, *body = list(csv.reader(io.StringIO(text))) or [list(columns)]
    if header != list(columns):
        raise ValueError(
            f"{path} has other columns ({', '.join(header)}) than {', '.join(columns)}; name another file with --csv"
        )
    # Without its end a line may lack part of its last cell, and the next row would be written behind it.
    if (text and not text.endswith("\n")) or any(len(cells) != len(columns) for cells in body):
        raise ValueError(f"{path} holds a line that is cut off or too long; remove it and run again")
    return pd.DataFrame(body, columns=list(columns), dtype=str)
