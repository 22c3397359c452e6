"""The table that tells the ways apart: each minus the smooth network and minus its rivals, seed by seed."""

from collections.abc import Iterator

import pandas as pd

from lgelu_lab.report.difference import INTERVAL
from lgelu_lab.report.frames import ReportData, of_label, seed_count
from lgelu_lab.report.markup import Column, Group, TableSpec
from lgelu_lab.report.numbers import NONE, metrics_in_words
from lgelu_lab.report.paper import Notes, trained_on
from lgelu_lab.report.results import EARLY, FROM_START, SMOOTH, results_of, way_difference
from lgelu_lab.report.run_tables import LEARNED_LABELS, profile_runs

_RIVALS = {"GELU, smooth": SMOOTH, "ReLU from the start": FROM_START, "swapped early": EARLY}
"""{heading: the way that is taken away}."""


Ways = dict[str, pd.DataFrame]


def _rows(data: ReportData) -> Iterator[Group]:
    for benchmark in dict.fromkeys(data.part("")["benchmark"]):
        ways = results_of(data, benchmark)
        learned = of_label(profile_runs(data), benchmark)
        for label in LEARNED_LABELS:
            if label in learned:
                ways[f"{label}, smooth"] = learned[label].assign(value=learned[label]["last_score"])
        for way, seeds in ways.items():
            if way != SMOOTH and len(seeds):
                yield (benchmark, way), (way, ways)


def _minus(heading: str, rival: str) -> Column:
    def cell(row: tuple[str, Ways], notes: Notes) -> str:
        way, ways = row
        difference = way_difference(ways, way, rival)
        return NONE if difference is None else str(difference)

    return Column(f"Minus {heading}", cell)


def _seeds(row: tuple[str, Ways]) -> pd.DataFrame:
    way, ways = row
    return ways[way]


def _trained_on(row: tuple[str, Ways], notes: Notes) -> str:
    return trained_on(_seeds(row), notes) if "record" in _seeds(row) else NONE


DIFFERENCE_TABLE = TableSpec(
    title="Which differences are more than chance, last epoch",
    caption=lambda data: (
        f"{metrics_in_words(data.part(''))} Each way's score minus that of the run with the same seed and recipe that "
        f"the heading names, mean over the seeds; of converted networks minus what they were before. {INTERVAL}"
    ),
    rows=_rows,
    head=("Benchmark", "Way"),
    columns=(
        *(_minus(heading, rival) for heading, rival in _RIVALS.items()),
        Column("Seeds", lambda row, notes: seed_count(_seeds(row)["seed"])),
        Column("Epochs × samples", _trained_on),
    ),
)
"""How the table is made."""
