"""Numbers as a reader sees them: digits that fit the metric, mean ± deviation, a dash where there is none."""

import math
import statistics
from collections.abc import Callable, Sequence

import pandas as pd

NONE = "–"
"""Where a number does not apply, e.g. λ of a GELU network."""

MISSING = "missing"
"""Where a run is not there. Never a zero."""

DIGITS = {"accuracy": 4, "perplexity": 2}
"""Digits after the point of a score of each metric; 4 for others."""

LOWER_IS_BETTER = frozenset({"perplexity", "word_error_rate"})
SAME_NEIGHBOUR = "same_neighbour"
"""The share of embeddings whose nearest neighbour is that of the original."""

_SHARES = frozenset({"accuracy", SAME_NEIGHBOUR})  # of the evaluation samples: a single one has a binomial interval

Show = int | Callable[[float], str]
"""So many digits after the point, or how a number is written."""


def digits_of(metric: str) -> int:
    """Digits after the point that a score of this metric is shown with."""
    return DIGITS.get(metric, 4)


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """One number with a minus sign, not a hyphen, and a plus where `signed` says so; what rounds to 0 has no sign."""
    value = round(value, digits) + 0.0
    return f"{value:{'+' if signed and value else ''}.{digits}f}".replace("-", "−")


def present(values: Sequence[object]) -> list:
    """Those that are there: neither None nor NaN."""
    return [value for value in values if value is not None and not pd.isna(value)]


def mean_and_deviation(values: Sequence[float | None], show: Show, *, signed: bool = False) -> str:
    """ "mean ± sample standard deviation"; the value alone for one; a dash where there is none.

    Where some seeds have a value and others have none, it says of how many the mean is. `signed` puts a sign before
    every mean but zero.
    """
    there = present(values)
    if not there:
        return NONE
    write = show if callable(show) else lambda value: number(value, show)
    mean = statistics.fmean(there)
    text = write(mean) if callable(show) else number(mean, show, signed=signed)
    text += f" ± {write(statistics.stdev(there))}" if len(there) > 1 else ""
    return text if len(there) == len(values) else f"{text} ({len(there)} of {len(values)} seeds)"


def wilson(share: float, samples: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share that was seen on so many samples."""
    z = statistics.NormalDist().inv_cdf(0.975)
    centre = (share + z * z / (2 * samples)) / (1 + z * z / samples)
    half = z / (1 + z * z / samples) * math.sqrt(share * (1 - share) / samples + (z / (2 * samples)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def sampled(metric: str, scores: Sequence[float | None], samples: float | None) -> tuple[float, float] | None:
    """What one seed's evaluation samples leave open of its accuracy, or another share (`wilson`); else None.

    Several seeds show their deviation; a perplexity has no binomial interval.
    """
    there = present(scores)
    if metric not in _SHARES or len(there) != 1 or not present([samples]):
        return None
    return wilson(float(there[0]), samples)


def interval(metric: str, scores: Sequence[float | None], samples: float | None) -> str:
    """`sampled` in words: "0.290 to 0.372"; empty where there is none."""
    ends = sampled(metric, scores, samples)
    return " to ".join(f"{end:.{3 if samples < 20_000 else 4}f}" for end in ends) if ends else ""


def score_text(metric: str, scores: Sequence[float | None], samples: float | None, otherwise: str = "") -> str:
    """`mean_and_deviation` of scores with their metric's digits, then in brackets their `interval`, or `otherwise`."""
    brackets = interval(metric, scores, samples) or otherwise
    return mean_and_deviation(scores, digits_of(metric)) + (f" ({brackets})" if brackets else "")


def largest(values: Sequence[float | None]) -> str:
    """The largest of those that are there, with two significant digits; a dash where there is none."""
    there = present(values)
    return f"{max(there):.2g}".replace("e-", "e−") if there else NONE


def count(value: float) -> str:
    """A whole number with separators: 32,561."""
    return f"{value:,.0f}"


def percentage(value: float) -> str:
    """A share of 1 in per cent, without the sign: it stands in the heading."""
    return number(100 * value, 1)


def metric_with_direction(metric: str, greater_is_better: bool) -> str:
    """The metric's name, with what is better where that is not the usual: "perplexity (lower is better)"."""
    return metric if greater_is_better else f"{metric} (lower is better)"


def listed(values: Sequence[object]) -> str:
    """ "0, 1, 2"."""
    return ", ".join(str(value) for value in values)


def either(values: Sequence[object]) -> str:
    """The different ones among the values: "50", or "4 or 50"."""
    return " or ".join(dict.fromkeys(str(value) for value in values))


def metrics_in_words(runs: pd.DataFrame) -> str:
    """One sentence on what the scores are: "Scores are accuracy; of gpt2-wikitext2 perplexity (lower is better)."

    Empty for no runs.
    """
    benchmarks: dict[str, list[str]] = {}
    for metric, greater, benchmark in runs[["metric", "greater_is_better", "benchmark"]].drop_duplicates().values:
        benchmarks.setdefault(metric_with_direction(metric, greater), []).append(benchmark)
    if not benchmarks:
        return ""
    usual, *others = sorted(benchmarks, key=lambda metric: -len(benchmarks[metric]))
    return "; ".join([f"Scores are {usual}", *(f"of {listed(benchmarks[metric])} {metric}" for metric in others)]) + "."
