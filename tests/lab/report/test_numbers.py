import math
import statistics

import pytest
from lgelu_lab.report.numbers import interval, mean_and_deviation


def test_mean_and_deviation_against_statistics():
    values = [0.91, 0.93, 0.98]
    assert mean_and_deviation(values, 4) == f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"
    assert mean_and_deviation([0.5], 2) == "0.50"
    assert mean_and_deviation([None, None], 2) == mean_and_deviation([], 2) == "–"
    assert mean_and_deviation([1.0, 2.0, 6.0], 2) == "3.00 ± 2.65"  # √(4 + 1 + 9)/√2
    assert mean_and_deviation([None, 1.0, 3.0], "{:.1f}".format) == "2.0 ± 1.4 (2 of 3 seeds)"
    assert mean_and_deviation([1.0, math.nan], "{:g}".format) == "1 (1 of 2 seeds)"


@pytest.mark.parametrize(("share", "samples"), [(0.33, 500), (0.0, 500), (1.0, 359), (0.9, 10_000), (0.5, 50_000)])
def test_the_interval_of_one_seed_is_wilsons(share, samples):
    """Its ends are the shares that lie 1.96 of their own standard errors from the one that was seen."""
    low, high = map(float, interval("accuracy", [share], samples).split(" to "))
    for end in (low, high):
        if 0 < end < 1:
            error = abs(end - share) / math.sqrt(end * (1 - end) / samples)
            assert error == pytest.approx(1.959964, rel=0.05)
    assert 0 <= low <= share <= high <= 1


def test_only_one_seeds_accuracy_has_an_interval():
    assert interval("accuracy", [0.33], 500) == "0.290 to 0.372"
    assert interval("perplexity", [30.0], 500) == ""
    assert (
        interval("accuracy", [0.3, 0.4], 500) == interval("accuracy", [0.3], None) == interval("accuracy", [], 5) == ""
    )
