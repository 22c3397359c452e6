"""A few training steps around the swap: the score after each number of steps, by what they begin with."""

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
from lgelu_lab.report.downstream.tables.columns import refusals
from lgelu_lab.report.downstream.tables.networks import LOWER_IS_BETTER
from lgelu_lab.report.markup import Cell, Table, missing_row
from lgelu_lab.report.numbers import NONE, count, digits_of, listed, number

NAME = "conversion-finetuning"
STARTS = {
    "direct": "direct swap, then tuned",
    "refit": "refit, then tuned",
    "anneal": "annealed, then swapped",
    "gelu": "GELU tuned, never swapped",
}
"""What the tables call the starts of `downstream.conversion_finetuning`."""

Runs = Mapping[tuple[str, int, float | None], Sequence[Row]]
"""{(start, steps, learning rate): that row of each seed}."""


def runs_of(records: Sequence[MeasurementRecord]) -> Runs:
    """The rows of one benchmark."""
    return rows_by(records, "start", "steps", "learning_rate")


def best_rate(runs: Runs, start: str, steps: int) -> Sequence[Row]:
    """The runs of the learning rate whose mean score is the best; none where none has a score."""
    found = [
        rows
        for (name, number_of_steps, _), rows in runs.items()
        if (name, number_of_steps) == (start, steps) and all(row["score"] is not None for row in rows)
    ]
    sign = -1 if found and found[0][0]["metric"] in LOWER_IS_BETTER else 1
    return max(found, key=lambda rows: sign * statistics.fmean(values_of(rows, "score")), default=())


def finetuning_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per benchmark, number of steps and learning rate; a column per start."""
    header = ("Benchmark", "Steps", "Learning rate", *STARTS.values(), "Seeds")
    found, rows = of_measurement(measurements, NAME), []
    for benchmark in _wanted(measurements):
        if benchmark not in found:
            rows.append(missing_row(benchmark, "all", len(header)))
            continue
        runs = runs_of(found[benchmark])
        for steps, rate in dict.fromkeys((steps, rate) for _, steps, rate in runs):
            cells = (_score(runs.get((start, steps, rate))) for start in STARTS)
            rate_text = NONE if rate is None else f"{rate:g}"
            rows.append((benchmark, str(steps), rate_text, *cells, seeds_there(found[benchmark])))
    return Table(
        key=NAME,
        title="Score after so many training steps, by what they begin with",
        caption="On the evaluation split, with ReLU but for the last column. Every number of steps is a run of its own "
        "with the same training rows in the same order. Refit: without labels, on the calibration rows that the "
        "settings name, before the first step. Annealed: λ-GELU in GELU's place, every λ in equal factors from 1 to "
        "159.6 over the steps, then ReLU. MLPs: SGD at a constant learning rate; GPT-2: AdamW, cosine to a tenth, no "
        "warm-up. Mean ± sample standard deviation over seeds.",
        header=header,
        rows=tuple(rows),
        notes=refusals(measurements, NAME),
        in_groups=True,
        text_columns=1,
    )


def finetuning_overview_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per benchmark and start, a column per number of steps, at the better learning rate; for the README."""
    found = of_measurement(measurements, NAME)
    steps = sorted({row["steps"] for records in found.values() for record in records for row in record.rows})
    rates = {
        benchmark: sorted({rate for _, _, rate in runs_of(records) if rate is not None}, reverse=True)
        for benchmark, records in found.items()
    }
    header = ("Benchmark", "Start", *(f"{count(number_of)} steps" for number_of in steps), "Seeds")
    rows: list[tuple[Cell | str, ...]] = []
    for benchmark in _wanted(measurements) if found else ():
        if benchmark not in found:
            rows.append(missing_row(benchmark, "all", len(header)))
            continue
        runs = runs_of(found[benchmark])
        for start, words in STARTS.items():
            cells = (_score(best_rate(runs, start, number_of)) for number_of in steps)
            rows.append((benchmark, words, *cells, seeds_there(found[benchmark])))
    tried = "; ".join(f"{name} {listed([f'{rate:g}' for rate in values])}" for name, values in rates.items())
    return Table(
        key="conversion-finetuning-overview",
        title="A few training steps around the swap",
        caption="Score on the evaluation split after so many steps, each a run of its own. Annealed: λ from 1 to 159.6 "
        "over the steps, then ReLU. Of the learning rates tried the one with the better mean is shown, chosen on the "
        f"same split ({tried}); the report has both. Mean ± sample standard deviation over seeds.",
        header=header,
        rows=tuple(rows),
        in_groups=True,
        text_columns=2,
    )


def _wanted(measurements: Sequence[MeasurementRecord]) -> list[str]:
    found = of_measurement(measurements, NAME)
    return [name for name in measured_benchmarks(measurements) if name in MEASURED_ON[NAME] or name in found]


def _score(rows: Sequence[Row] | None) -> str:
    if not rows:
        return NONE
    digits = digits_of(rows[0]["metric"])
    return over_seeds(values_of(rows, "score"), lambda value: number(value, digits))
