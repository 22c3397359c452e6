"""Spearman correlation ρ_S(e; m₁, m₂) over layers between the hardness profiles of two init modes (the paper)."""

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lgelu_lab.studies.records import RunRecord


@dataclass(frozen=True)
class CorrelationCurve:
    """ρ_S over the epochs: mean, lowest and highest over the seeds where it is defined.

    None where it is defined for no seed: a profile in which every layer has the same λ has no ranks.
    """

    epochs: tuple[float, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    seeds: int


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation; equal values share their average rank.

    None where it is undefined: fewer than two values, or all values of a side equal.

    Raises:
        ValueError: the two differ in length.
        ImportError: scipy is not installed.
    """
    if len(first) != len(second):
        raise ValueError(f"rank correlation compares values in pairs, got {len(first)} and {len(second)}")
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    if importlib.util.find_spec("scipy") is None:
        raise ImportError("rank correlations need scipy: pip install 'hf-lgelu[benchmarks]'")
    from scipy.stats import spearmanr

    return float(spearmanr(first, second).statistic)


def hardness_path(record: RunRecord) -> dict[float, list[float]]:
    """{epoch: λ of every layer, in the order of depth}, with epoch 0 for the initial profile."""
    sites = list(record.initial_hardness)
    path = {0.0: [record.initial_hardness[site] for site in sites]}
    return path | {epoch.epoch: [epoch.hardness[site] for site in sites] for epoch in record.epochs}


def correlation_curve(first: Sequence[RunRecord], second: Sequence[RunRecord]) -> CorrelationCurve | None:
    """ρ_S of the seeds that both sides have, epoch by epoch; None where they share no seed or no epoch."""
    pairs = [(hardness_path(a), hardness_path(b)) for a, b in _paired_by_seed(first, second)]
    if not pairs:
        return None
    shared = set.intersection(*(set(path) for pair in pairs for path in pair))
    epochs = sorted(shared)
    values = [_defined([spearman(a[epoch], b[epoch]) for a, b in pairs]) for epoch in epochs]
    return CorrelationCurve(
        epochs=tuple(epochs),
        mean=tuple(statistics.fmean(row) if row else None for row in values),
        low=tuple(min(row, default=None) for row in values),
        high=tuple(max(row, default=None) for row in values),
        seeds=len(pairs),
    )


def _paired_by_seed(first: Sequence[RunRecord], second: Sequence[RunRecord]) -> list[tuple[RunRecord, RunRecord]]:
    others: Mapping[int, RunRecord] = {record.config["seed"]: record for record in second}
    return [(record, others[record.config["seed"]]) for record in first if record.config["seed"] in others]


def _defined(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
