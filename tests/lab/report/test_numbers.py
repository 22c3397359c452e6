import math
import statistics

import pytest
from lgelu_lab.report.frames import run_frame
from lgelu_lab.report.numbers import (
    amount,
    count,
    either,
    interval,
    largest,
    mean_and_deviation,
    metrics_in_words,
    number,
    percentage,
)


def test_mean_and_deviation_against_statistics():
    values = [0.91, 0.93, 0.98]
    assert mean_and_deviation(values, 4) == f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"
    assert mean_and_deviation([0.5], 2) == "0.50"
    assert mean_and_deviation([None, None], 2) == mean_and_deviation([], 2) == "–"
    assert mean_and_deviation([1.0, 2.0, 6.0], 2) == "3.00 ± 2.65"  # √(4 + 1 + 9)/√2
    assert mean_and_deviation([None, 1.0, 3.0], "{:.1f}".format) == "2.0 ± 1.4 (2 of 3 seeds)"
    assert mean_and_deviation([1.0, math.nan], "{:g}".format) == "1 (1 of 2 seeds)"


def test_signs_are_signs_and_zero_has_none():
    assert mean_and_deviation([-0.00004, 0.0], 4, signed=True) == "0.0000 ± 0.0000"
    assert mean_and_deviation([-0.0123], 2) == "−0.01"
    assert mean_and_deviation([0.0123], 2, signed=True) == "+0.01"
    assert number(-0.25, 2) == "−0.25"
    assert number(0.25, 2) == "0.25"
    assert number(-0.001, 2) == number(-0.001, 2, signed=True) == "0.00"


def test_counts_and_extremes():
    assert count(32561.0) == "32,561"
    assert largest([0.1, 2.345, 1.0]) == "2.3"
    assert largest([0.1, None]) == "0.1"
    assert largest([3e-14]) == "3e−14"
    assert largest([None]) == largest([]) == "–"
    assert (amount(20.0), amount(19.33), amount(1024.0)) == ("20", "19.3", "1,024")
    assert percentage(0.1234) == "12.3"
    assert either([50, 50]) == "50"
    assert either([4, 50, 4]) == "4 or 50"


def test_the_metric_of_each_benchmark_is_said_with_its_direction(record_of):
    perplexity = record_of(benchmark="gpt2-wikitext2", metric="perplexity", greater_is_better=False)
    accuracy = [record_of(benchmark=name) for name in ("mlp-adult", "mlp-fmnist")]
    assert metrics_in_words(run_frame(accuracy)) == "Scores are accuracy."
    expected = "Scores are accuracy; of gpt2-wikitext2 perplexity (lower is better)."
    assert metrics_in_words(run_frame([perplexity, *accuracy])) == expected
    assert metrics_in_words(run_frame(accuracy)[:0]) == ""


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
