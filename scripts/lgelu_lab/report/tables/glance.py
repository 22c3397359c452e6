"""The whole matter in one table: what ReLU network each way ends with, beside the smooth GELU network."""

from collections.abc import Sequence

from lgelu_lab.report.configurations import (
    Groups,
    benchmarks_of,
    grouped,
    is_grid,
    is_relufied,
    of_benchmark,
    seed_count,
)
from lgelu_lab.report.markup import Cell, Table
from lgelu_lab.report.numbers import MISSING, digits_of, mean_and_deviation, metrics_in_words
from lgelu_lab.report.paper import marked, note_lines
from lgelu_lab.report.substitution import evaluation
from lgelu_lab.studies.records import RunRecord

WAYS = ("GELU, then swapped", "λ-GELU hardened, swapped", "Swapped early, trained on", "ReLU from the start")
"""The ways to a ReLU network."""


def glance_groups(records: Sequence[RunRecord]) -> Groups:
    """All runs but the grid's."""
    return grouped(record for record in records if not is_grid(record))


def ways_of(groups: Groups, benchmark: str) -> dict[str, list[RunRecord]]:
    """{way to a ReLU network: its runs} of one benchmark; an empty list where there are none."""
    found = of_benchmark(groups, benchmark)
    early = [seeds for seeds in found.values() if is_relufied(seeds[0]) and seeds[0].config["activation"] == "gelu"]
    runs = (found.get("GELU"), found.get("λ-GELU uniform, hardened"), early[0] if early else None, found.get("ReLU"))
    return dict(zip(WAYS, (seeds or [] for seeds in runs), strict=True))


def relu_score(record: RunRecord) -> float | None:
    """The score of the ReLU network that a run ends with; None where it was not measured."""
    if record.config["activation"] == "relu":
        return record.last.score
    score = evaluation(record, "last")
    return None if score is None else score.relu


def glance_table(records: Sequence[RunRecord]) -> Table:
    """Score in the last epoch of GELU and of four ReLU networks, a row per benchmark."""
    groups = glance_groups(records)
    runs = [record for seeds in groups.values() for record in seeds]
    notes: dict[str, str] = {}
    return Table(
        key="glance",
        title="Four ways to a ReLU network, score in the last epoch",
        caption=f"{metrics_in_words(runs)} GELU is the smooth network; the other columns are networks with ReLU alone. "
        "Mean ± sample standard deviation over seeds, whose number is in brackets where it is not the paper's three.",
        header=("Benchmark", "GELU", *WAYS),
        rows=tuple(_row(benchmark, groups, notes) for benchmark in benchmarks_of(runs)),
        notes=note_lines(notes),
        text_columns=1,
    )


def _row(benchmark: str, groups: Groups, notes: dict[str, str]) -> tuple[Cell | str, ...]:
    ways = ways_of(groups, benchmark)
    gelu = ways[WAYS[0]]
    shown = [record for seeds in ways.values() for record in seeds]
    return (
        benchmark + marked(shown, notes),
        _score(gelu, [record.last.score for record in gelu]),
        *(_score(seeds, [relu_score(record) for record in seeds]) for seeds in ways.values()),
    )


def _score(seeds: Sequence[RunRecord], values: Sequence[float | None]) -> Cell:
    if not seeds:
        return Cell(MISSING, "missing")
    text, count = mean_and_deviation(values, digits_of(seeds[0].metric)), seed_count(seeds)
    return Cell(f"{text} ({count} seeds)" if " of " in count else text)
