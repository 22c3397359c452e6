"""ReLU in the gates' place, same weights (the paper's Table II), beside the rival that swaps first."""

from collections.abc import Sequence

from lgelu_lab.report.configurations import (
    grouped,
    is_grid,
    is_relufied,
    learns_hardness,
    of_benchmark,
    seed_count,
    smallest_hardness,
)
from lgelu_lab.report.markup import Cell, Table, missing_row
from lgelu_lab.report.numbers import NONE, digits_of, largest, mean_and_deviation, metrics_in_words, tone
from lgelu_lab.report.paper import note_lines, trained_on
from lgelu_lab.report.paper_values import PaperValues
from lgelu_lab.report.substitution import EVALUATIONS, SubstitutionScores, evaluation
from lgelu_lab.report.tables.profiles import expected_benchmarks
from lgelu_lab.studies.experiments import STUDIES
from lgelu_lab.studies.records import RunRecord

SUBSTITUTION_LABELS = ("GELU", "λ-GELU uniform, hardened", "GELU → ReLU at 25%, trained on")
"""What the study asks for on every benchmark."""

EARLY = "†"
_EARLY_NOTE = (
    f"{EARLY} In at least one seed this epoch lies before the gates were hard (smallest λ below half the target) or, "
    "for ReLU swapped in during training, before the switch."
)
_RIVAL_NOTE = (
    "→ ReLU: from the switch on this is a ReLU network that trains on. Its score is both, as is and substituted; "
    "there is nothing left to exchange."
)


def substitution_table(
    records: Sequence[RunRecord], at: str, paper: PaperValues | None = None, *, learned: bool = False
) -> Table:
    """Table II at one evaluation of each run.

    Args:
        records: the runs; those of the grid and of other activations are left out.
        at: a key of EVALUATIONS.
        paper: the paper's values, shown at its own choice of checkpoint.
        learned: show λ-GELU as learned, swapped without hardening, instead of the paper's rows.

    Raises ValueError for another `at`, or where a run is there twice.
    """
    shown = paper if paper is not None and at == "best" and paper.has("substituted") else None
    header = (
        *("Benchmark", "Activation", "As is", "ReLU substituted", *(("ReLU substituted, paper",) if shown else ())),
        *("Change", "Epoch", "Smallest λ", "Largest logit change", "Unchanged predictions"),
        *("Seeds", "Epochs × samples"),
    )
    chosen = [record for record in records if not is_grid(record) and _belongs(record, learned)]
    groups = grouped(chosen)
    notes: dict[str, str] = {}
    rows: list[tuple[Cell | str, ...]] = []
    for benchmark in expected_benchmarks(records):
        found = of_benchmark(groups, benchmark)
        wanted = SUBSTITUTION_LABELS if benchmark in STUDIES["substitution"].benchmarks and not learned else ()
        if wanted and not found:
            rows.append(missing_row(benchmark, "all", len(header)))
            continue
        for label in dict.fromkeys([*wanted, *found]):
            rows += _rows(benchmark, label, found.get(label), at, shown, notes, len(header))
    what = "λ-GELU as learned, swapped without hardening, " if learned else "ReLU in the gates' place, same weights, "
    return Table(
        key=f"substitution-{'learned-' * learned}{at}".replace("_", "-"),
        title=what + EVALUATIONS[at],
        caption=_caption(chosen),
        header=header,
        rows=tuple(rows),
        in_groups=True,
        notes=(*_explanations(rows, chosen), *note_lines(notes)),
    )


def _rows(
    benchmark: str,
    label: str,
    seeds: Sequence[RunRecord] | None,
    at: str,
    paper: PaperValues | None,
    notes: dict[str, str],
    columns: int,
) -> list[tuple[Cell | str, ...]]:
    """One row, or none for runs that were never substituted."""
    if not seeds:
        return [missing_row(benchmark, label, columns)]
    scores = [evaluation(record, at) for record in seeds]
    if any(score is None for score in scores):
        return []
    digits = digits_of(seeds[0].metric)
    early = any(score.early for score in scores)
    epoch = mean_and_deviation([score.epoch.epoch for score in scores], 0) + f" {EARLY}" * early
    smallest = mean_and_deviation([smallest_hardness(score.epoch) for score in scores], 1)
    change, logits, unchanged = _change(scores, digits, seeds[0].greater_is_better)
    row = (
        benchmark,
        label,
        mean_and_deviation([score.as_is for score in scores], digits),
        mean_and_deviation([score.relu for score in scores], digits),
        *((paper.text(seeds[0], "substituted", digits),) if paper else ()),
        change,
        Cell(epoch, "warning" if early else ""),
        Cell(smallest, "warning" if early and smallest != NONE else ""),
        logits,
        unchanged,
        seed_count(seeds),
        trained_on(seeds, notes),
    )
    return [row]


def _change(scores: Sequence[SubstitutionScores], digits: int, greater_is_better: bool) -> tuple[Cell | str, ...]:
    if all(score.is_relu for score in scores):
        return (NONE,) * 3
    changes = [score.change for score in scores]
    return (
        Cell(mean_and_deviation(changes, digits, signed=True), tone(changes, digits, greater_is_better)),
        largest([score.max_logit_change for score in scores]),
        mean_and_deviation([score.unchanged_predictions for score in scores], 4),
    )


def _belongs(record: RunRecord, learned: bool) -> bool:
    if learned:
        return learns_hardness(record) and not record.config["harden"]
    return record.config["activation"] == "gelu" or record.config["harden"]


def _explanations(rows: Sequence[Sequence[Cell | str]], runs: Sequence[RunRecord]) -> list[str]:
    early = any(isinstance(cell, Cell) and cell.text.endswith(EARLY) for row in rows for cell in row)
    return [*[_EARLY_NOTE] * early, *[_RIVAL_NOTE] * any(map(is_relufied, runs))]


def _caption(records: Sequence[RunRecord]) -> str:
    text = f"{metrics_in_words(records)} Change: ReLU substituted minus as is".lstrip()
    lower = dict.fromkeys(record.metric for record in records if not record.greater_is_better)
    if lower:
        text += f"; of {' and '.join(lower)} lower is better, so there a change above zero is a loss"
    return text + ". Logits and predictions are compared on every evaluation sample."
