"""Which runs of each study are there and which are not."""

from collections.abc import Mapping, Sequence

from lgelu_lab.report.markup import Cell, Table
from lgelu_lab.report.numbers import NONE
from lgelu_lab.report.paper import PAPER_RECIPES
from lgelu_lab.studies.experiments import STUDIES, Experiment, Study
from lgelu_lab.studies.records import RunRecord

_NAMED_AT_MOST = 6


def coverage_table(records: Sequence[RunRecord], failed: Mapping[str, str] | None = None) -> Table:
    """A row per study and benchmark. `failed`: {run: last line of its error}, of runs that left no record."""
    there = {record.name for record in records}
    failed = failed or {}
    rows = [
        _row(study, benchmark, there, failed) for study in _studies(there, records) for benchmark in study.benchmarks
    ]
    planned = {name for study in STUDIES.values() for name in _names(study.build(study.benchmarks))}
    notes = [f"Failed: {name}: {error}" for name, error in failed.items() if name not in there]
    others = sorted(there - planned)
    if others:
        notes.append(f"Of no study, and shown all the same: {_shortened(others)}.")
    return Table(
        key="coverage",
        title="Runs of each study",
        caption="A run that is missing shows as missing in the tables and figures, never as zero. A run may serve "
        "several studies.",
        header=("Study", "Benchmark", "Runs", "Missing"),
        rows=tuple(rows),
        in_groups=True,
        notes=tuple(notes),
        text_columns=4,
        wide_columns=(3,),
    )


def _studies(there: set[str], records: Sequence[RunRecord]) -> list[Study]:
    # A look at a toy benchmark is no half-finished reproduction of the paper.
    of_paper = any(record.config["benchmark"] in PAPER_RECIPES for record in records)
    return [
        study
        for study in STUDIES.values()
        if (of_paper and set(study.benchmarks) <= PAPER_RECIPES.keys())
        or there & set(_names(study.build(study.benchmarks)))
    ]


def _row(study: Study, benchmark: str, there: set[str], failed: Mapping[str, str]) -> tuple[Cell | str, ...]:
    names = _names(study.build((benchmark,)))
    missing = [name for name in names if name not in there]
    count = f"{len(names) - len(missing)} of {len(names)}"
    if not missing:
        return (study.name, benchmark, count, NONE)
    prefix = names[0].rpartition("/")[0] + "/"
    text = "all" if len(missing) == len(names) else _shortened([name.removeprefix(prefix) for name in missing])
    errors = sum(name in failed for name in missing)
    text += f" ({errors} failed)" if errors else ""
    return (study.name, benchmark, Cell(count, "missing"), Cell(text, "missing"))


def _names(experiments: Sequence[Experiment]) -> list[str]:
    return [experiment.name for experiment in experiments]


def _shortened(names: Sequence[str]) -> str:
    text = ", ".join(names[:_NAMED_AT_MOST])
    more = len(names) - _NAMED_AT_MOST
    return f"{text} and {more} more" if more > 0 else text
