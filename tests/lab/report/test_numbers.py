import statistics

import pytest
from lgelu_lab.report.numbers import count, either, largest, mean_and_deviation, metrics_in_words, number, tone


def test_mean_and_deviation_against_statistics():
    values = [0.91, 0.93, 0.98]
    assert mean_and_deviation(values, 4) == f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"
    assert mean_and_deviation([0.5], 2) == "0.50"
    assert mean_and_deviation([0.5, None], 2) == mean_and_deviation([], 2) == "–"


def test_signs_are_signs_and_zero_has_none():
    assert mean_and_deviation([-0.00004, 0.0], 4, signed=True) == "0.0000 ± 0.0000"
    assert mean_and_deviation([-0.0123], 2) == "−0.01"
    assert mean_and_deviation([0.0123], 2, signed=True) == "+0.01"
    assert number(-0.25, 2) == "−0.25"
    assert number(0.25, 2) == "0.25"


def test_counts_and_extremes():
    assert count(32561.0) == "32,561"
    assert largest([0.1, 2.345, 1.0]) == "2.3"
    assert largest([0.1, None]) == largest([]) == "–"
    assert either([50, 50]) == "50"
    assert either([4, 50, 4]) == "4 or 50"


@pytest.mark.parametrize(
    ("changes", "greater_is_better", "expected"),
    [
        ([0.01, 0.02], True, "better"),
        ([0.01, 0.02], False, "worse"),
        ([-0.01, -0.02], True, "worse"),
        ([-0.01, -0.02], False, "better"),
        ([0.00004, -0.00003], True, ""),
        ([], True, ""),
    ],
)
def test_what_is_better_follows_the_direction_of_the_metric(changes, greater_is_better, expected):
    assert tone(changes, 4, greater_is_better) == expected


def test_the_metric_of_each_benchmark_is_said_with_its_direction(record_of):
    perplexity = record_of(benchmark="gpt2-wikitext2", metric="perplexity", greater_is_better=False)
    accuracy = [record_of(benchmark=name) for name in ("mlp-adult", "mlp-fmnist")]
    assert metrics_in_words(accuracy) == "Scores are accuracy."
    expected = "Scores are accuracy; of gpt2-wikitext2 perplexity (lower is better)."
    assert metrics_in_words([perplexity, *accuracy]) == expected
    assert metrics_in_words([]) == ""
