"""Whether the numbers on the pages are those of the records; no torch but for the cards.

`places.csv` says where each number is from, a row a piece of text: page, text, source.

- text: as on the page; numbers in {braces} are compared, rounded as they stand there and without their sign.
- source: where these are, in their order, several joined by " & ":
  "table KEY ? first cells > column" (numbers of one cell of the report), or "FILE ? name=value, … > column" (rows of a
  CSV, of a measurement's record, or runs; several rows give their mean), or a key of MATHEMATICS; each perhaps with
  "[index]" of the number, " * factor", or " over " another. A text without braces is a list of numbers that are
  settings, or another's, wherever they stand on the page.
"""

import csv
import json
import math
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from lgelu_lab.report.frames import ReportData
from lgelu_lab.report.markup import Table, build_table, to_markdown
from lgelu_lab.report.write import ALL_TABLES, END, START, WRITTEN_PAGES, put_results

PLACES = Path(__file__).with_name("places.csv")
PAGES = ("README.md", "docs/*.md", "docs/lab/*.md")
_WITHOUT_RESULTS = ("api.md",)
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*\.\d+(?![\w.]*\d)|(?<![\w.])\d[\d,]*(?= %)")
_NO_PROSE = re.compile(rf"```.*?```|`[^`\n]*`|{START}.*?{END}|\]\([^)]*\)|arXiv:[\d.]+", re.DOTALL)


def _most_below(step: Callable[[float], float]) -> float:
    """κ = max u·(1 − G(u)), on a grid."""
    return max(u * (1 - step(u)) for u in (i / 1000 for i in range(8000)))


def _distance(step: Callable[[float], float]) -> float:
    """E∞ = ∫|H(x) − G(x)|dx, by trapezoids up to 40."""
    return 2 * (sum(1 - step(i / 1000) for i in range(1, 40_000)) + 0.25) / 1000


_ERF = statistics.NormalDist().cdf
_STEPS: dict[str, Callable[[float], float]] = {
    "λ-GELU": _ERF,
    "tanh": lambda u: (1 + math.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))) / 2,
    "λ-SiLU": lambda u: 1 / (1 + math.exp(-u)),
}
MATHEMATICS: dict[str, Callable[[], float]] = {
    **{f"κ of {name}": partial(_most_below, step) for name, step in _STEPS.items()},
    **{f"E∞ of {name}": partial(_distance, step) for name, step in _STEPS.items()},
    **{f"target of {name}": lambda step=step: _distance(step) / 5e-3 for name, step in _STEPS.items()},
    "swap error": lambda: _most_below(_ERF) / (_distance(_ERF) / 5e-3),
}
"""Computed anew, without the library."""


@dataclass(frozen=True, eq=False)
class Pages:
    """The pages below a folder, and the report's data that they are compared with."""

    root: Path
    data: ReportData

    @cached_property
    def texts(self) -> dict[str, str]:
        """{page: its text}."""
        found = (path for pattern in PAGES for path in sorted(self.root.glob(pattern)))
        return {
            path.relative_to(self.root).as_posix(): path.read_text(encoding="utf-8")
            for path in found
            if path.name not in _WITHOUT_RESULTS
        }

    @cache  # noqa: B019 - as long as the check
    def table(self, key: str) -> Table:
        """A table of the report, of these records."""
        return build_table(ALL_TABLES[key], self.data)


def complaints(root: Path, data: ReportData) -> Iterator[str]:
    """A line for everything on the pages that is not as in the records."""
    pages = Pages(root, data)
    yield from _generated(pages)
    yield from _scores_of_rows(data)
    told: dict[str, list[str]] = {page: [] for page in pages.texts}
    free: dict[str, set[str]] = {page: set() for page in pages.texts}
    with PLACES.open(encoding="utf-8", newline="") as file:
        for place in csv.DictReader(file):
            text = _flat(re.sub(r"[{}]", "", place["text"]))
            if "{" not in place["text"]:
                free[place["page"]].update(text.split())
            elif text in _flat(pages.texts[place["page"]]):
                told[place["page"]].append(text)
                yield from _differing(pages, **place)
            else:
                yield f"{place['page']} does not say “{text}”, which is from {place['source']}"
    for page, text in pages.texts.items():
        prose = _flat(_NO_PROSE.sub(" ", text))
        for known in sorted(told[page], key=len, reverse=True):
            prose = prose.replace(_flat(_NO_PROSE.sub(" ", known)), " ")
        for found in _NUMBER.finditer(prose):
            if found.group() not in free[page]:
                around = prose[max(0, found.start() - 40) : found.end() + 20]
                yield f"{page}: {found.group()} is from no record that {PLACES.name} names: “…{around}…”"


def _generated(pages: Pages) -> Iterator[str]:
    """What scripts/report.py would write otherwise."""
    from lgelu_lab.studies.cards import write_committed_cards  # loads torch

    cards = pages.root / "model_cards"
    for page, keys in WRITTEN_PAGES.items():
        tables = "\n\n".join(to_markdown(pages.table(key)) for key in keys if pages.table(key).rows)
        wanted = put_results(pages.texts[page], tables)
        yield from _other_lines(page, wanted, pages.texts[page])
    there = (cards / "report" / "tables.md").read_text(encoding="utf-8")
    for key in ALL_TABLES:
        table = to_markdown(pages.table(key), level=3)
        if pages.table(key).rows and table not in there:
            title = table.partition("\n")[0]
            yield from _other_lines("model_cards/report/tables.md", table, there[there.find(title) :])
    with tempfile.TemporaryDirectory() as folder:
        for card in write_committed_cards(cards, folder):
            text = (cards / card.name).read_text(encoding="utf-8")
            yield from _other_lines(f"model_cards/{card.name}", card.read_text(encoding="utf-8"), text)


def _scores_of_rows(data: ReportData) -> Iterator[str]:
    """The scores of runs that kept what each evaluated row came to, computed anew."""
    for record in data.runs["record"]:
        for prefix in ("", "relu_") if record.rows else ():
            if f"{prefix}loss" not in record.rows:
                continue
            loss = statistics.fmean(record.rows[f"{prefix}loss"])
            correct = record.rows.get(f"{prefix}correct")
            score = statistics.fmean(correct) if correct else math.exp(loss)
            for told, computed in ((f"{prefix}score", score), (f"{prefix}loss", loss)):
                if not math.isclose(getattr(record.last, told), computed, rel_tol=1e-4):
                    yield f"{record.name} records {told} {getattr(record.last, told)}, its rows give {computed:.6g}"


def _other_lines(page: str, wanted: str, there: str) -> Iterator[str]:
    for line, other in zip(wanted.splitlines(), there.splitlines(), strict=False):
        if line != other:
            yield f"{page} says “{other}”, its records say “{line}” (make report)"


def _differing(pages: Pages, page: str, text: str, source: str) -> Iterator[str]:
    shown = re.findall(r"\{([^}]*)\}", text)
    try:
        values = [value for part in source.split(" & ") for value in _values(pages, part)]
    except (LookupError, ValueError, OSError) as error:
        yield f"{page}: {source} is not there ({error})"
        return
    if len(values) != len(shown):
        yield f"{page}: “{text}” has {len(shown)} numbers, {source} has {values}"
        return
    for number, value in zip(shown, values, strict=True):
        digits = len(number.partition(".")[2])
        if abs(float(number.lstrip("+−").replace(",", "")) - abs(value)) > 0.5 * 10.0**-digits * (1 + 1e-6):
            yield f"{page} says {number} in “{_flat(text)}”, {source} has {abs(value):.6g}"


def _values(pages: Pages, source: str) -> list[float]:
    """The numbers of a source; of "A over B" their ratio."""
    if " over " in source:
        first, second = (_values(pages, part) for part in source.split(" over "))
        return [a / b for a, b in zip(first, second, strict=True)]
    source, _, factor = source.partition(" * ")
    place, _, column = source.partition(" > ")
    name, _, condition = place.partition(" ? ")
    if name in MATHEMATICS:
        values = [MATHEMATICS[name]()]
    elif name.startswith("table "):
        values = _of_cell(pages.table(name.removeprefix("table ")), condition, column)
    else:
        wanted = dict(part.split("=", 1) for part in condition.split(", ") if part)
        rows = [row for row in _rows(pages.root, name) if all(_is(row.get(k), value) for k, value in wanted.items())]
        values = [statistics.fmean(float(row[column]) for row in rows)]
    return [value * float(factor or 1) for value in values]


def _of_cell(table: Table, head: str, column: str) -> list[float]:
    column, _, which = column.partition("[")
    index = table.header.index(column)
    for row in table.rows:
        if " / ".join(row).startswith(head):
            text = re.sub(r"\d+ (times|seeds)|of \d+|\[\w\]", "", row[index]).replace("−", "-").replace(",", "")
            numbers = [float(found) for found in re.findall(r"-?\d+\.?\d*", text)]
            return [numbers[int(which.removesuffix("]"))]] if which else numbers
    raise LookupError(f"no row {head}")


def _is(value: Any, wanted: str) -> bool:
    try:
        return float(value) == float(wanted)
    except (TypeError, ValueError):
        return str("" if value is None else value) == wanted


@cache
def _rows(root: Path, pattern: str) -> Sequence[dict[str, Any]]:
    """Rows of CSV files, of measurements' records, or of runs: their last epoch."""
    files = sorted(root.glob(pattern))
    if not files:
        raise FileNotFoundError(pattern)
    rows: list[dict[str, Any]] = []
    for file in files:
        if file.suffix == ".csv":
            rows += csv.DictReader(file.open(encoding="utf-8", newline=""))
            continue
        record = json.loads(file.read_text(encoding="utf-8"))
        rows += record["rows"] if "measurement" in record else [{**record, **record["epochs"][-1]}]
    return rows


def _flat(text: str) -> str:
    return " ".join(text.split())
