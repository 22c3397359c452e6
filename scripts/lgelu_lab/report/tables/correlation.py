"""Spearman correlation between the hardness profiles of the init modes, at the start and at the end."""

from collections.abc import Sequence
from itertools import combinations

from lgelu_lab.report.configurations import Groups, benchmarks_of, of_benchmark
from lgelu_lab.report.correlation import CorrelationCurve, correlation_curve
from lgelu_lab.report.markup import Table
from lgelu_lab.report.numbers import number
from lgelu_lab.report.tables.profiles import profile_groups
from lgelu_lab.studies.experiments import INIT_MODES
from lgelu_lab.studies.records import RunRecord

UNDEFINED = "undefined"


def correlation_curves(groups: Groups, benchmark: str) -> dict[tuple[str, str], CorrelationCurve]:
    """{(init mode, init mode): ρ_S over the epochs} for the pairs of which there are runs."""
    seeds = of_benchmark(groups, benchmark)
    found = {
        (first, second): correlation_curve(seeds[f"λ-GELU {first}"], seeds[f"λ-GELU {second}"])
        for first, second in combinations(INIT_MODES, 2)
        if f"λ-GELU {first}" in seeds and f"λ-GELU {second}" in seeds
    }
    return {pair: curve for pair, curve in found.items() if curve is not None}


def correlation_table(records: Sequence[RunRecord]) -> Table | None:
    """ρ_S before training, halfway, and in the last epoch; None where no two init modes have runs."""
    groups = profile_groups(records)
    rows = []
    for benchmark in benchmarks_of(record for seeds in groups.values() for record in seeds):
        for (first, second), curve in correlation_curves(groups, benchmark).items():
            half, last = (len(curve.epochs) - 1) // 2, len(curve.epochs) - 1
            rows.append(
                (
                    benchmark,
                    f"{first} and {second}",
                    str(curve.seeds),
                    _at(curve, 0),
                    f"{_at(curve, half)}, epoch {curve.epochs[half]:g}",
                    f"{_at(curve, last)}, epoch {curve.epochs[last]:g}",
                )
            )
    if not rows:
        return None
    return Table(
        key="correlation",
        title="Do the init modes end at the same profile? Spearman's ρ_S over layers",
        caption="Mean over the seeds that both init modes have, with the lowest and highest in brackets. Layers with "
        f"equal λ share their average rank; where every layer has the same λ, as in a uniform start, ρ_S is "
        f"{UNDEFINED}: such seeds are left out, and the curves have a gap.",
        header=("Benchmark", "Init modes", "Seeds", "Before training", "Halfway", "Last epoch"),
        rows=tuple(rows),
        in_groups=True,
    )


def _at(curve: CorrelationCurve, index: int) -> str:
    mean, low, high = curve.mean[index], curve.low[index], curve.high[index]
    if mean is None:
        return UNDEFINED
    text = number(mean, 2, signed=True)
    return text if low == high else f"{text} ({number(low, 2, signed=True)} to {number(high, 2, signed=True)})"
