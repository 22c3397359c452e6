"""The tables that the README shows until it takes `report.readme_tables`. No torch."""

import statistics
from collections.abc import Callable, Sequence

from hf_lgelu.studies.configurations import grouped
from hf_lgelu.studies.records import EpochRecord, RunRecord

_MISSING = "–"


def mean_and_deviation(values: Sequence[float | None], digits: int) -> str:
    """ "mean ± sample standard deviation"; the value alone for one; a dash where any is missing."""
    if not values or any(value is None for value in values):
        return _MISSING
    mean = round(statistics.fmean(values), digits) + 0.0  # -0.00004 is shown as 0.0000, without a sign
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def validation_table(records: Sequence[RunRecord]) -> str:
    """Best validation score, its epoch, final mean λ and drift of every configuration (the paper's Table I)."""
    header = (
        "Benchmark",
        "Activation",
        "Seeds",
        "Best validation score",
        "Its epoch",
        "Mean λ, last epoch",
        "Drift V_λ",
    )
    rows = [
        (
            benchmark,
            label,
            str(len(seeds)),
            mean_and_deviation([record.best.score for record in seeds], 4),
            mean_and_deviation([record.best.epoch for record in seeds], 0),
            mean_and_deviation([record.last.mean_hardness for record in seeds], 2),
            mean_and_deviation([record.drift for record in seeds], 2),
        )
        for (benchmark, label), seeds in grouped(records).items()
    ]
    return _markdown(header, rows)


def substitution_table(records: Sequence[RunRecord], at: str = "last") -> str:
    """The metric as it is and with ReLU substituted, same weights (the paper's Table II).

    `at` names the evaluation of each run: "last", "best" (best validation score as it is, the paper's
    choice) or "best_substituted". Models without a smooth gate are left out.
    """
    if at not in ("last", "best", "best_substituted"):
        raise ValueError(f"unknown evaluation {at!r}; accepted: last, best, best_substituted")
    header = (
        *("Benchmark", "Activation", "Seeds", "Epoch", "Smallest λ", "As is", "ReLU substituted"),
        *("Change", "Largest logit change", "Unchanged predictions"),
    )
    rows = []
    for (benchmark, label), seeds in grouped(records).items():
        epochs = [getattr(record, at) for record in seeds]
        if any(epoch is None or epoch.relu_score is None for epoch in epochs):
            continue
        rows.append(
            (
                benchmark,
                label,
                str(len(seeds)),
                mean_and_deviation([epoch.epoch for epoch in epochs], 0),
                mean_and_deviation([_smallest(epoch) for epoch in epochs], 1),
                mean_and_deviation([epoch.score for epoch in epochs], 4),
                mean_and_deviation([epoch.relu_score for epoch in epochs], 4),
                mean_and_deviation([epoch.relu_score - epoch.score for epoch in epochs], 4),
                _largest([epoch.relu_max_logit_change for epoch in epochs]),
                mean_and_deviation([epoch.relu_unchanged_predictions for epoch in epochs], 4),
            )
        )
    return _markdown(header, rows)


def all_tables(records: Sequence[RunRecord]) -> str:
    """What `scripts/report.py` writes to tables.md and the README shows."""
    return "\n\n".join(
        (
            "**The gates as learned**",
            validation_table(records),
            "**ReLU in their place, same weights, last epoch.** GELU is the direct swap",
            substitution_table(records, at="last"),
            "**The same at each run's best epoch as trained**, the paper's choice of checkpoint",
            substitution_table(records, at="best"),
            basis(records),
        )
    )


def basis(records: Sequence[RunRecord]) -> str:
    """One sentence on what the numbers rest on: seeds, epochs, split, hardware, versions."""
    sentences = []
    for benchmark in dict.fromkeys(record.config["benchmark"] for record in records):
        runs = [record for record in records if record.config["benchmark"] == benchmark]
        seeds = sorted({record.config["seed"] for record in runs})
        sentences.append(
            f"{benchmark}: seeds {_listed(seeds)}, {_same(runs, lambda r: f'{r.last.epoch:g}')} epochs, "
            f"{_same(runs, lambda r: r.data['train_samples'])} training rows, metric {runs[0].metric} on "
            f"{_same(runs, lambda r: r.data['eval_samples'])} rows of "
            f"{_same(runs, lambda r: r.data['eval_split'])}, batch "
            f"{_same(runs, lambda r: r.config['train_batch_size'])}, {_same(runs, lambda r: r.config['optim'])} "
            f"at {_same(runs, lambda r: r.config['learning_rate'])}."
        )
    versions = [
        f"{name} {_same(records, lambda record, name=name: record.versions.get(name, '?'))}"
        for name in ("torch", "transformers")
    ]
    sentences.append(
        f"{_same(records, _hardware)}; {', '.join(versions)}. ± is the sample standard deviation over seeds."
    )
    return " ".join(sentences)


def _smallest(epoch: EpochRecord) -> float | None:
    return min(epoch.hardness.values()) if epoch.hardness else None


def _largest(values: Sequence[float | None]) -> str:
    return _MISSING if any(value is None for value in values) else f"{max(values):.2g}"


def _same(records: Sequence[RunRecord], look: Callable[[RunRecord], object]) -> str:
    return " or ".join(dict.fromkeys(str(look(record)) for record in records))


def _hardware(record: RunRecord) -> str:
    machine = record.hardware
    threads = machine["threads_per_process"]
    where = ", ".join(machine["accelerators"]) or f"{machine['cpu']}, {threads} thread{'s' * (threads > 1)}"
    return where if machine["processes"] == 1 else f"{machine['processes']} × {where}"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
