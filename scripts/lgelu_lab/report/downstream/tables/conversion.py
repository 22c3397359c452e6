"""ReLU networks made without training: score and distance from the original, by way and calibration rows."""

import statistics
from collections.abc import Mapping, Sequence

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.measurements import (
    MEASURED_ON,
    Row,
    measured_benchmarks,
    of_measurement,
    over_seeds,
    rows_by,
    seeds_there,
    values_of,
)
from lgelu_lab.report.downstream.tables.columns import (
    Column,
    constant,
    header_of,
    measured,
    percentage,
    quantity,
    refusals,
    rows_of,
    score,
    worst,
)
from lgelu_lab.report.downstream.tables.networks import LOWER_IS_BETTER
from lgelu_lab.report.markup import Cell, Table, missing_row
from lgelu_lab.report.numbers import NONE, count, digits_of, number

NAME = "conversion"
METHODS = {
    "original": "original",
    "direct": "direct swap",
    "bias-fold": "bias fold",
    "refit": "refit",
    "hardened": "hardened in training",
}
"""What the tables call the methods of `downstream.conversion`."""

_SHOWN_ROWS = (64, 256, 1024)  # of the README's table, beside the most


def _way(rows: Sequence[Row]) -> Cell | str:
    words = METHODS.get(rows[0]["method"], rows[0]["method"])
    return Cell(words, "warning") if all(row["refusal"] is not None for row in rows) else words


def change(row: Row) -> float | None:
    """Score less the original's: of perplexity in per cent of it; None where there is no network."""
    if row["score"] is None:
        return None
    difference = row["score"] - row["original_score"]
    return 100 * difference / row["original_score"] if row["metric"] in LOWER_IS_BETTER else difference


def _change(rows: Sequence[Row]) -> str:
    if rows[0]["method"] == "original":
        return NONE
    relative = rows[0]["metric"] in LOWER_IS_BETTER
    changes = [change(row) for row in rows]
    there = [value for value in changes if value is not None]
    digits = 2 if relative else digits_of(rows[0]["metric"])
    text = over_seeds(changes, lambda value: number(round(value, digits) + 0.0, digits))  # no sign before a zero
    # The mean alone has a sign; the deviation has none.
    text = f"+{text}" if there and round(statistics.fmean(there), digits) > 0 else text
    return f"{text} %" if relative and there else text


_COLUMNS = (
    Column("Way", _way),
    constant("Calibration rows", "rows", count),
    score("Score", "score"),
    Column("Against the original", _change),
    measured("KL, nats", "kl"),
    quantity("Same prediction, %", "agreement", percentage),
    worst("Largest logit change", "max_logit_change"),
)


def conversion_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per way and number of calibration rows."""
    return Table(
        key=NAME,
        title="ReLU without training: score and distance from the GELU network",
        caption="Everything is measured on the evaluation split, against the same network with its GELU. Calibration "
        "rows are drawn from the training rows, without labels: of text tokens, else rows of features or images; all "
        "where there are fewer than asked. Bias fold: only the biases behind the gates are fitted. Hardened: another "
        "network, trained with λ-GELU to become ReLU, so its distance from the GELU network is that of two "
        "trainings. Differences from the original are taken seed by seed. Mean ± sample "
        "standard deviation over seeds; of logit changes the largest.",
        header=header_of(_COLUMNS),
        rows=rows_of(measurements, NAME, ("model", "method", "rows"), _COLUMNS),
        notes=refusals(measurements, NAME),
        in_groups=True,
        text_columns=3,
    )


def conversion_overview_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per benchmark and a column per way, for the README."""
    found = of_measurement(measurements, NAME)
    wanted = [name for name in measured_benchmarks(measurements) if name in MEASURED_ON[NAME] or name in found]
    header = (
        "Benchmark",
        "Original",
        "Direct swap",
        "Bias fold",
        *(f"Refit, {count(rows)} rows" for rows in _SHOWN_ROWS),
    )
    header = (*header, "Refit, most rows", "Hardened in training", "Seeds")
    return Table(
        key="conversion-overview",
        title="ReLU without training",
        caption="Score on the evaluation split of a GELU network, with ReLU put in as it is, with fitted biases, with "
        "the linear maps behind the gates refitted on so many unlabelled training rows (of text: tokens), and of a "
        "network hardened in training. Mean ± sample standard deviation over seeds; in brackets the rows.",
        header=header,
        rows=tuple(
            _overview_row(name, found[name]) if name in found else missing_row(name, NONE, len(header))
            for name in wanted
        )
        if found
        else (),
        text_columns=1,
    )


def _overview_row(benchmark: str, records: Sequence[MeasurementRecord]) -> tuple[str, ...]:
    ways: Mapping[tuple, list[Row]] = rows_by(records, "method", "rows")
    refits = {rows: seeds for (method, rows), seeds in ways.items() if method == "refit"}
    folded = next((seeds for (method, _), seeds in ways.items() if method == "bias-fold"), None)
    most = max(refits, default=None)
    return (
        benchmark,
        _score(ways.get(("original", None))),
        _score(ways.get(("direct", None))),
        _score(folded),
        *(_score(refits.get(rows)) for rows in _SHOWN_ROWS),
        NONE if most is None else f"{_score(refits[most])} ({count(most)})",
        _score(ways.get(("hardened", None))),
        seeds_there(records),
    )


def _score(rows: Sequence[Row] | None) -> str:
    if not rows:
        return NONE
    digits = digits_of(rows[0]["metric"])
    return over_seeds(values_of(rows, "score"), lambda value: number(value, digits))
