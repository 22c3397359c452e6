"""Numbers as a reader sees them: digits that fit the metric, mean ± deviation, a dash where there is none."""

import statistics
from collections.abc import Iterable, Sequence

from lgelu_lab.studies.records import RunRecord

NONE = "–"
"""Where a number does not apply, e.g. λ of a GELU network."""

MISSING = "missing"
"""Where a run is not there. Never a zero."""

_DIGITS = {"accuracy": 4, "perplexity": 2}


def digits_of(metric: str) -> int:
    """Digits after the point that a score of this metric is shown with."""
    return _DIGITS.get(metric, 4)


def metric_with_direction(metric: str, greater_is_better: bool) -> str:
    """The metric's name, with what is better where that is not the usual: "perplexity (lower is better)"."""
    return metric if greater_is_better else f"{metric} (lower is better)"


def metrics_in_words(records: Iterable[RunRecord]) -> str:
    """One sentence on what the scores are: "Scores are accuracy; of gpt2-wikitext2 perplexity (lower is better)."

    Empty for no records.
    """
    benchmarks: dict[str, list[str]] = {}
    for record in records:
        names = benchmarks.setdefault(metric_with_direction(record.metric, record.greater_is_better), [])
        if record.config["benchmark"] not in names:
            names.append(record.config["benchmark"])
    if not benchmarks:
        return ""
    usual, *others = sorted(benchmarks, key=lambda metric: -len(benchmarks[metric]))
    return "; ".join([f"Scores are {usual}", *(f"of {listed(benchmarks[metric])} {metric}" for metric in others)]) + "."


def mean_and_deviation(values: Sequence[float | None], digits: int, *, signed: bool = False) -> str:
    """ "mean ± sample standard deviation"; the value alone for one; a dash where any is missing.

    `signed` puts a sign before every mean but zero.
    """
    if not values or any(value is None for value in values):
        return NONE
    mean = round(statistics.fmean(values), digits) + 0.0  # -0.00004 is shown as 0.0000, without a sign
    text = number(mean, digits, signed=signed)
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def tone(changes: Sequence[float], digits: int, greater_is_better: bool) -> str:
    """ "better", "worse", or "" for changes whose mean rounds to nothing, and for none."""
    mean = round(statistics.fmean(changes), digits) if changes else 0
    if mean == 0:
        return ""
    return "better" if (mean > 0) == greater_is_better else "worse"


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """One number with a minus sign, not a hyphen, and a plus where `signed` says so."""
    text = f"{value:+.{digits}f}" if signed and value != 0 else f"{value:.{digits}f}"
    return text.replace("-", "−")


def count(value: float) -> str:
    """A whole number with separators: 32,561."""
    return f"{value:,.0f}"


def largest(values: Sequence[float | None]) -> str:
    """The largest, with two significant digits; a dash where any is missing."""
    return NONE if not values or any(value is None for value in values) else f"{max(values):.2g}"


def listed(values: Sequence[object]) -> str:
    """ "0, 1, 2"."""
    return ", ".join(str(value) for value in values)


def either(values: Sequence[object]) -> str:
    """The different ones among the values: "50", or "4 or 50"."""
    return " or ".join(dict.fromkeys(str(value) for value in values))
