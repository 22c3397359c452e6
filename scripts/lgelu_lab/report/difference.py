"""How far two ways are apart, seed by seed, and whether chance can be told from it."""

import math
import statistics
from dataclasses import dataclass

import pandas as pd

from lgelu_lab.report.numbers import LOWER_IS_BETTER, digits_of, number, sampled

LEVEL = 0.95
"""Of every interval of a difference."""

INTERVAL = (
    "In brackets the 95 % interval of the mean difference: Student's over the seeds, or for one seed's accuracy "
    "Newcombe's (of two independent samples, which is wide for two networks judged on the same rows). Where it "
    "includes zero, the difference may be chance."
)


@dataclass(frozen=True)
class Difference:
    """The differences of a score, one a seed, first minus second.

    Args:
        values: at least one.
        metric: of the score.
        ends: the 95 % interval of their mean; None where nothing says what chance leaves open (one perplexity).
    """

    values: tuple[float, ...]
    metric: str
    ends: tuple[float, float] | None

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def gain(self) -> float:
        """The mean, above zero where the first is the better one."""
        return -self.mean if self.metric in LOWER_IS_BETTER else self.mean

    @property
    def is_told_apart(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.ends is not None and not self.ends[0] <= 0 <= self.ends[1]

    def __str__(self) -> str:
        """ "−0.0031 (−0.0038 to −0.0025)"."""
        digits = digits_of(self.metric)
        ends = "" if self.ends is None else " to ".join(number(end, digits, signed=True) for end in self.ends)
        return number(self.mean, digits, signed=True) + (f" ({ends})" if ends else "")


def difference_of(
    first: pd.Series, second: pd.Series, metric: str, samples: pd.Series | float | None = None
) -> Difference | None:
    """Of two columns of scores, a row a seed; rows without one of the two are left out. None where none is left.

    `samples`: how many evaluation rows each score is of.
    """
    pairs = pd.DataFrame({"first": first, "second": second}, dtype=float).dropna()
    if not len(pairs):
        return None
    values = tuple(pairs["first"] - pairs["second"])
    if len(values) > 1:
        return Difference(values, metric, student(values))
    rows = samples.loc[pairs.index[0]] if isinstance(samples, pd.Series) else samples
    return Difference(values, metric, newcombe(metric, *pairs.iloc[0], rows))


def student(values: tuple[float, ...]) -> tuple[float, float]:
    """Student's 95 % interval of the mean of at least two values."""
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def newcombe(metric: str, first: float, second: float, samples: float | None) -> tuple[float, float] | None:
    """Newcombe's 95 % interval (1998, method 10) of the difference of two accuracies; None for another metric."""
    one, other = sampled(metric, [first], samples), sampled(metric, [second], samples)
    if one is None or other is None:
        return None
    difference = first - second
    return (
        difference - math.hypot(first - one[0], other[1] - second),
        difference + math.hypot(one[1] - first, second - other[0]),
    )
