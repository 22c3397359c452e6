"""A table from measurement records: the same row of every seed is one row of the table."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.measurements import (
    MEASURED_ON,
    Row,
    label_of,
    measured_benchmarks,
    of_measurement,
    over_seeds,
    rows_by,
    seeds_there,
    values_of,
)
from lgelu_lab.report.markup import Cell, missing_row
from lgelu_lab.report.numbers import NONE, digits_of, largest, number

Show = Callable[[float], str]


@dataclass(frozen=True)
class Column:
    """A heading, and what stands under it for one row of each seed.

    Raises KeyError in `text` where a record's row does not have what the column shows.
    """

    heading: str
    text: Callable[[Sequence[Row]], Cell | str]


def quantity(heading: str, key: str, show: Show) -> Column:
    """Mean ± sample standard deviation of one key, written by `show`; a dash where it does not apply."""
    return Column(heading, lambda rows: over_seeds(values_of(rows, key), show))


def measured(heading: str, key: str, digits: int = 3) -> Column:
    """Likewise, with as many digits after the point as give the mean so many significant ones."""

    def text(rows: Sequence[Row]) -> str:
        values = [value for value in values_of(rows, key) if value is not None]
        size = abs(statistics.fmean(values)) if values else 0
        places = max(0, digits - 1 - math.floor(math.log10(size))) if size else digits - 1
        return over_seeds(values_of(rows, key), fixed(places))

    return Column(heading, text)


def worst(heading: str, key: str) -> Column:
    """The largest over the seeds, with two significant digits; a dash where it applies to none."""

    def text(rows: Sequence[Row]) -> str:
        return largest([value for value in values_of(rows, key) if value is not None]).replace("e-", "e−")

    return Column(heading, text)


def refusals(measurements: Sequence[MeasurementRecord], name: str) -> tuple[str, ...]:
    """A line for each different refusal in the rows of a measurement, in the tool's own words."""
    said: dict[str, list[str]] = {}
    for records in of_measurement(measurements, name).values():
        for row in (row for record in records for row in record.rows if row["refusal"] is not None):
            models = said.setdefault(row["refusal"], [])
            models += [label_of(row["model"])] * (label_of(row["model"]) not in models)
    return tuple(f"Refused, {', '.join(models)}: “{words}”." for words, models in said.items())


def score(heading: str, key: str) -> Column:
    """Likewise of a score, with the digits of the row's metric."""
    return Column(heading, lambda rows: over_seeds(values_of(rows, key), fixed(digits_of(rows[0]["metric"]))))


def constant(heading: str, key: str, show: Callable[[Any], str] = str) -> Column:
    """What is the same in every seed; "4 or 5" where it is not."""
    return Column(heading, lambda rows: " or ".join(dict.fromkeys(_shown(row[key], show) for row in rows)))


def fixed(digits: int) -> Show:
    """So many digits after the point."""
    return lambda value: number(value, digits)


def amount(value: float) -> str:
    """A count, or a mean of counts: "20", "19.3"."""
    return f"{value:,.1f}".removesuffix(".0")


def percentage(value: float) -> str:
    """A share of 1 in per cent, without the sign: it stands in the heading."""
    return number(100 * value, 1)


def rows_of(
    measurements: Sequence[MeasurementRecord], name: str, keys: Sequence[str], columns: Sequence[Column]
) -> tuple[tuple[Cell | str, ...], ...]:
    """The rows of a table whose first columns are benchmark and network and whose last one is the seeds.

    Args:
        measurements: all of them.
        name: of the measurement.
        keys: what tells the rows of one record apart; "model" first.
        columns: between the network and the seeds.
    """
    found = of_measurement(measurements, name)
    wanted = [name_ for name_ in measured_benchmarks(measurements) if name_ in MEASURED_ON[name] or name_ in found]
    rows: list[tuple[Cell | str, ...]] = []
    for benchmark in wanted:
        if benchmark not in found:
            rows.append(missing_row(benchmark, "all", len(columns) + 3))
            continue
        for values, seeds in rows_by(found[benchmark], *keys).items():
            cells = (column.text(seeds) for column in columns)
            rows.append((benchmark, label_of(values[0]), *cells, seeds_there(seeds)))
    return tuple(rows)


def header_of(columns: Sequence[Column]) -> tuple[str, ...]:
    """The headings that belong to `rows_of`."""
    return ("Benchmark", "Network", *(column.heading for column in columns), "Seeds")


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return NONE if value is None else show(value)
