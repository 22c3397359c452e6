"""The gates as learned: best validation score, mean λ and drift of every configuration (the paper's Table I)."""

from collections.abc import Sequence

from lgelu_lab.report.configurations import Groups, grouped, is_grid, is_relufied, of_benchmark, seed_count
from lgelu_lab.report.markup import Cell, Table, missing_row
from lgelu_lab.report.numbers import digits_of, mean_and_deviation, metrics_in_words
from lgelu_lab.report.paper import PAPER_RECIPES, note_lines, trained_on
from lgelu_lab.report.paper_values import NOT_AT_HAND, PaperValues
from lgelu_lab.studies.experiments import INIT_MODES, STUDIES
from lgelu_lab.studies.records import RunRecord

LEARNED_LABELS = tuple(f"λ-GELU {mode}" for mode in INIT_MODES)
PROFILE_LABELS = ("GELU", "ReLU", *LEARNED_LABELS)


def profile_groups(records: Sequence[RunRecord]) -> Groups:
    """The runs of Table I: GELU, ReLU and λ-GELU as learned and hardened; neither grid nor other activations."""
    kept = [
        record
        for record in records
        if not is_grid(record)
        and not is_relufied(record)
        and record.config["activation"] in ("gelu", "relu", "lambda_gelu")
    ]
    return grouped(kept)


def profile_table(records: Sequence[RunRecord], paper: PaperValues | None = None) -> Table:
    """Table I. Configurations that the study asks for and that have no record are rows that say so."""
    paper = paper or PaperValues()
    groups = profile_groups(records)
    columns = _columns(paper)
    notes: dict[str, str] = {}
    rows = []
    for benchmark in expected_benchmarks(records):
        found = of_benchmark(groups, benchmark)
        if not found:
            rows.append(missing_row(benchmark, "all", len(columns)))
            continue
        wanted = PROFILE_LABELS if benchmark in STUDIES["profiles"].benchmarks else ()
        for label in [*wanted, *(name for name in found if name not in wanted)]:
            seeds = found.get(label)
            rows.append(_row(label, seeds, paper, notes) if seeds else missing_row(benchmark, label, len(columns)))
    return Table(
        key="profiles",
        title="The gates as learned (the paper's Table I)",
        caption=f"{metrics_in_words(record for seeds in groups.values() for record in seeds)} "
        "Mean ± sample standard deviation over seeds. The best validation score is that of "
        "each run's best epoch; λ is averaged over layers, and the drift V_λ is each layer's way over the epochs, "
        "averaged likewise.",
        header=tuple(columns),
        rows=tuple(rows),
        in_groups=True,
        notes=(*note_lines(notes), *(() if paper.values else (NOT_AT_HAND,))),
    )


def expected_benchmarks(records: Sequence[RunRecord]) -> list[str]:
    """Those with a record and, where one of the paper's is among them, all of the paper's."""
    found = list(dict.fromkeys(record.config["benchmark"] for record in records if not is_grid(record)))
    if not PAPER_RECIPES.keys() & set(found):
        return found
    return [*PAPER_RECIPES, *(name for name in found if name not in PAPER_RECIPES)]


def _columns(paper: PaperValues) -> list[str]:
    beside = {"Best validation score": "best_validation_score", "Mean λ, last epoch": "mean_hardness"}
    beside["Drift V_λ"] = "drift"
    columns = ["Benchmark", "Activation"]
    for name in ("Best validation score", "Its epoch", "Mean λ, last epoch", "Drift V_λ"):
        columns.append(name)
        if name in beside and paper.has(beside[name]):
            columns.append(f"{name}, paper")
    return [*columns, "Seeds", "Epochs × samples"]


def _row(label: str, seeds: Sequence[RunRecord], paper: PaperValues, notes: dict[str, str]) -> tuple[Cell | str, ...]:
    first = seeds[0]
    digits = digits_of(first.metric)
    cells = [first.config["benchmark"], label]
    quantities = (
        ("best_validation_score", mean_and_deviation([record.best.score for record in seeds], digits), digits),
        ("", mean_and_deviation([record.best.epoch for record in seeds], 0), 0),
        ("mean_hardness", mean_and_deviation([record.last.mean_hardness for record in seeds], 2), 2),
        ("drift", mean_and_deviation([record.drift for record in seeds], 2), 2),
    )
    for quantity, text, places in quantities:
        cells.append(text)
        if quantity and paper.has(quantity):
            cells.append(paper.text(first, quantity, places))
    return (*cells, seed_count(seeds), trained_on(seeds, notes))
