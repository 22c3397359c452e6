"""λ-GELU beside other activations: best validation score with the same seeds and steps."""

from collections.abc import Sequence

from lgelu_lab.report.configurations import (
    Groups,
    benchmarks_of,
    grouped,
    is_grid,
    is_relufied,
    of_benchmark,
    paired,
    seed_count,
)
from lgelu_lab.report.markup import Cell, Table, missing_row
from lgelu_lab.report.numbers import NONE, digits_of, mean_and_deviation, metrics_in_words, tone
from lgelu_lab.report.paper import note_lines, trained_on
from lgelu_lab.report.tables.profiles import LEARNED_LABELS
from lgelu_lab.studies.experiments import STUDIES
from lgelu_lab.studies.records import RunRecord

RELATED_LABELS = ("ReLU", "GELU", "SiLU", "Mish", "PReLU", "Swish, learnable β", *LEARNED_LABELS)
_OTHERS = ("silu", "mish", "prelu", "learnable_swish")


def related_groups(records: Sequence[RunRecord]) -> Groups:
    """The runs of the comparison, on the benchmarks where one of the other activations was trained."""
    runs = [
        record for record in records if not is_grid(record) and not record.config["harden"] and not is_relufied(record)
    ]
    compared = {record.config["benchmark"] for record in runs if record.config["activation"] in _OTHERS}
    groups = grouped(record for record in runs if record.config["benchmark"] in compared)
    return {key: seeds for key, seeds in groups.items() if key[1] in RELATED_LABELS}


def related_table(records: Sequence[RunRecord]) -> Table | None:
    """Best validation score of every activation and its distance from GELU; None where only GELU and ReLU are there."""
    groups = related_groups(records)
    if not groups:
        return None
    notes: dict[str, str] = {}
    rows = []
    for benchmark in benchmarks_of(record for seeds in groups.values() for record in seeds):
        found = of_benchmark(groups, benchmark)
        wanted = RELATED_LABELS if benchmark in STUDIES["related"].benchmarks else tuple(found)
        rows += [_row(benchmark, label, found, notes) for label in wanted]
    return Table(
        key="related",
        title="Best validation score beside other activations",
        caption=f"{metrics_in_words(record for seeds in groups.values() for record in seeds)} "
        "Minus GELU: the difference from the GELU run of the same seed and recipe, mean ± sample standard deviation.",
        header=(
            "Benchmark",
            "Activation",
            "Best validation score",
            "Minus GELU",
            "Seeds",
            "Epochs × samples",
        ),
        rows=tuple(rows),
        in_groups=True,
        notes=note_lines(notes),
    )


def _row(
    benchmark: str, label: str, found: dict[str, list[RunRecord]], notes: dict[str, str]
) -> tuple[Cell | str, ...]:
    seeds = found.get(label)
    if not seeds:
        return missing_row(benchmark, label, 6)
    digits = digits_of(seeds[0].metric)
    gains = [run.best.score - gelu.best.score for run, gelu in paired(seeds, found.get("GELU", []))]
    gain = Cell(mean_and_deviation(gains, digits, signed=True), tone(gains, digits, seeds[0].greater_is_better))
    return (
        benchmark,
        label,
        mean_and_deviation([record.best.score for record in seeds], digits),
        NONE if label == "GELU" else gain,
        seed_count(seeds),
        trained_on(seeds, notes),
    )
