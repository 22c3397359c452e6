"""The networks that were measured: their scores as trained, and with ReLU in the gates' place."""

from collections.abc import Sequence
from typing import Any

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.measurements import (
    MODEL_LABELS,
    label_of,
    measured_benchmarks,
    over_seeds,
    seeds_there,
)
from lgelu_lab.report.markup import Cell, Table
from lgelu_lab.report.numbers import digits_of, metric_with_direction, number

LOWER_IS_BETTER = {"perplexity"}

Summaries = dict[tuple[str, str], dict[int, dict[str, Any]]]
"""{(benchmark, network): {seed: what the measurements' records say of it}}."""


def networks_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per benchmark and trained network; the hardened one with ReLU is a column of its row."""
    summaries = network_summaries(measurements)
    rows = []
    for benchmark in measured_benchmarks(measurements):
        for model in MODEL_LABELS:
            seeds = summaries.get((benchmark, model))
            if seeds:
                rows.append(_row(benchmark, model, list(seeds.values())))
    return Table(
        key="networks",
        title="The networks that were measured",
        caption="Score on the evaluation split in the last epoch, as trained and with ReLU in the gates' place. Mean "
        "± sample standard deviation over seeds.",
        header=("Benchmark", "Network", "Metric", "As trained", "With ReLU", "Target λ", "Seeds"),
        rows=tuple(rows),
        in_groups=True,
        text_columns=3,
    )


def network_summaries(measurements: Sequence[MeasurementRecord]) -> Summaries:
    """What the records say of each network; the substituted one is the hardened one's run.

    Raises ValueError where two measurements were made on different networks of the same name and seed.
    """
    found: Summaries = {}
    for record in measurements:
        for model, summary in record.models.items():
            seeds = found.setdefault((record.benchmark, model.removesuffix("_relu")), {})
            if seeds.setdefault(record.seed, summary) != summary:
                raise ValueError(
                    f"the measurements of {record.benchmark}, seed {record.seed}, were made on different networks "
                    f"{model!r}: {seeds[record.seed]} and, in {record.measurement}, {summary}; measure again what is "
                    "older than the networks"
                )
    return found


def _row(benchmark: str, model: str, seeds: Sequence[dict[str, Any]]) -> tuple[Cell | str, ...]:
    metric = seeds[0]["metric"]
    digits = digits_of(metric)
    shown = {
        key: over_seeds([seed[key] for seed in seeds], lambda value, digits=places: number(value, digits))
        for key, places in (("score", digits), ("relu_score", digits), ("target_hardness", 1))
    }
    return (
        benchmark,
        label_of(model),
        metric_with_direction(metric, metric not in LOWER_IS_BETTER),
        shown["score"],
        shown["relu_score"],
        shown["target_hardness"].removesuffix(" ± 0.0"),
        seeds_there(seeds),
    )
