import itertools
import math
import random
import warnings

import pytest
from lgelu_lab.report.correlation import correlation_curve, hardness_path, spearman


def ranks(values):
    """Average ranks, by counting: 1 + how many are smaller + half of how many others are equal."""
    return [1 + sum(v < w for v in values) + (sum(v == w for v in values) - 1) / 2 for w in values]


def spearman_by_hand(first, second):
    a, b = ranks(first), ranks(second)
    mean = (len(a) + 1) / 2
    covariance = math.fsum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return covariance / math.sqrt(math.fsum((x - mean) ** 2 for x in a) * math.fsum((y - mean) ** 2 for y in b))


def test_spearman_against_ranks_by_hand():
    generator = random.Random(3)
    for size in (2, 3, 4, 12, 17):
        for _ in range(20):
            first = [generator.uniform(1, 9) for _ in range(size)]
            second = [value**3 + generator.uniform(-40, 40) for value in first]
            assert spearman(first, second) == pytest.approx(spearman_by_hand(first, second), abs=1e-12)


def test_ties_share_their_average_rank():
    for first, second in itertools.product(itertools.product((1.0, 2.0, 3.0), repeat=4), [(1, 2, 3, 4), (2, 1, 1, 3)]):
        if len(set(first)) > 1:
            assert spearman(first, second) == pytest.approx(spearman_by_hand(first, second), abs=1e-12)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138, abs=1e-12)


def test_a_constant_profile_has_no_correlation_rather_than_nan_or_zero():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spearman([1.0067] * 4, [1.0, 2.0, 3.0, 4.0]) is None
        assert spearman([1.0, 2.0, 3.0, 4.0], [1.0067] * 4) is None
        assert spearman([1.0], [2.0]) is None
    with pytest.raises(ValueError, match="got 2 and 3"):
        spearman([1, 2], [1, 2, 3])


def run(record_of, paths, seed=0, initial=(1.0, 1.0, 1.0)):
    sites = ("z", "a", "m")  # not in alphabetical order: the order of depth is the record's
    hardness = [dict(zip(sites, path, strict=True)) for path in paths]
    scores = (0.5,) * len(paths)
    record = record_of(activation="lambda_gelu", seed=seed, hardness=hardness, scores=scores, relu_scores=scores)
    record.initial_hardness.update(zip(sites, initial, strict=True))
    return record


def test_layers_keep_the_order_of_depth_and_start_at_epoch_0(record_of):
    record = run(record_of, [(1, 2, 3), (4, 5, 6)], initial=(7, 8, 9))
    record.epochs[1].hardness["z"] = record.epochs[1].hardness.pop("z")  # now last in this epoch
    assert hardness_path(record) == {0.0: [7, 8, 9], 1.0: [1, 2, 3], 2.0: [4, 5, 6]}


def test_the_curve_is_the_mean_over_seeds_with_its_range_and_a_gap_where_undefined(record_of):
    up, down, mixed = (1, 2, 3), (3, 2, 1), (1, 3, 2)
    first = [run(record_of, [up, up], seed=0), run(record_of, [up, up], seed=1), run(record_of, [up, up], seed=5)]
    second = [
        run(record_of, [up, up], seed=0, initial=up),
        run(record_of, [down, mixed], seed=1, initial=down),
    ]
    curve = correlation_curve(first, second)
    assert curve.epochs == (0.0, 1.0, 2.0)
    assert curve.seeds == 2  # seed 5 has no partner
    assert curve.mean == (None, pytest.approx(0.0), pytest.approx(0.75))
    assert curve.low == (None, pytest.approx(-1.0), pytest.approx(0.5))
    assert curve.high == (None, pytest.approx(1.0), pytest.approx(1.0))
    assert correlation_curve(first, [run(record_of, [up], seed=9)]) is None


def test_an_epoch_counts_the_seeds_where_it_is_defined(record_of):
    flat, up, down = (2, 2, 2), (1, 2, 3), (3, 2, 1)
    first = [run(record_of, [flat], seed=0), run(record_of, [up], seed=1)]
    second = [run(record_of, [up], seed=0), run(record_of, [down], seed=1)]
    assert correlation_curve(first, second).mean == (None, pytest.approx(-1.0))
