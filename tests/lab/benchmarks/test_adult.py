"""Adult's preprocessing, against features written by hand and by a loop over Python floats."""

import math

import datasets
import numpy as np
import pytest
import torch
from lgelu_lab.benchmarks.adult import CATEGORY_COLUMNS, NUMERIC_COLUMNS, load_adult
from lgelu_lab.benchmarks.data import DataOptions


@pytest.fixture
def load_rows(write_splits):
    """({split: {column: values}}, options) → BenchmarkData."""

    def load(splits, **options):
        data_dir = write_splits("adult", {name: datasets.Dataset.from_dict(rows) for name, rows in splits.items()})
        return load_adult(DataOptions(data_dir=data_dir, **options))

    return load


def loop_features(train, rows):
    """Every feature of every row, one number at a time."""
    count = len(rows["age"])
    features = [[] for _ in range(count)]
    for name in NUMERIC_COLUMNS:
        mean = math.fsum(train[name]) / len(train[name])
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in train[name]) / len(train[name]))
        for i in range(count):
            features[i].append((rows[name][i] - mean) / deviation if deviation else 0.0)
    for name in CATEGORY_COLUMNS:
        for category in sorted(set(train[name])):
            for i in range(count):
                features[i].append(1.0 if rows[name][i] == category else 0.0)
    return features


def row_numbers(data):
    """Which rows of the only split were trained and evaluated on: fnlwgt is 100,000 plus the row number."""
    column = NUMERIC_COLUMNS.index("fnlwgt")
    weights = torch.cat([rows.features[:, column] for rows in (data.train, data.eval)])
    numbers = weights.argsort().argsort().tolist()
    return numbers[: len(data.train)], numbers[len(data.train) :]


def test_features_and_labels_equal_a_loop(load_rows, adult_rows):
    train, test = adult_rows(24), adult_rows(10, education=["Masters", "HS-grad"] * 5)
    data = load_rows({"train": train, "test": test})
    for rows, raw in ((data.train, train), (data.eval, test)):
        expected = loop_features(train, raw)
        assert rows.features.shape == (len(expected), data.train.num_features)
        np.testing.assert_allclose(rows.features, expected, rtol=1e-6, atol=1e-6)
        assert rows.labels.tolist() == [int(value == ">50K") for value in raw["income"]]
    assert data.train.num_features == 6 + 3 + 2 + 1 + 4 + 2 + 1 + 2 + 2
    assert data.label_names == ("<=50K", ">50K")
    assert data.eval_split == "test"


def test_ucis_own_spelling_gives_the_same_rows(load_rows, adult_rows):
    """A space before each value, a dot after the income, a null where another copy has `?`."""
    plain = adult_rows(12)
    spaced = plain | {
        "workclass": [None if value == "?" else f" {value}" for value in plain["workclass"]],
        "income": [f" {value}." for value in plain["income"]],
    }
    data = load_rows({"train": plain, "test": spaced})
    assert torch.equal(data.eval.features, data.train.features)
    assert torch.equal(data.eval.labels, data.train.labels)
    assert 0 < data.eval.labels.sum() < 12


def test_without_a_test_split_a_third_is_held_out(load_rows, adult_rows):
    data = load_rows({"train": adult_rows(48)})
    train, test = row_numbers(data)
    assert len(test) == 16
    assert data.train.labels.tolist() == [int(i % 4 == 0) for i in train]
    assert data.eval.labels.tolist() == [int(i % 4 == 0) for i in test]
    assert data.eval.labels.sum() == 4  # of 12 among 48
    assert data.eval_split == "test (held out, 1/3 of the rows)"
    ages = np.array([20 + 3 * i % 41 for i in [*train, *test]])
    expected = (ages - ages[:32].mean()) / ages[:32].std()  # of the rows that are trained on alone
    np.testing.assert_allclose(
        torch.cat([data.train.features, data.eval.features])[:, 0], expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"income": ["<=50K", "50000", ">50K"]},
            "'income'.*'50000'.*'<=50K' and '>50K'",
        ),
        ({"age": ["39", "40", "41"]}, "'age' of adult.*numbers"),
        ({"hours_per_week": [40, None, 20]}, "'hours.per.week' of adult.*missing"),
    ],
)
def test_values_that_make_no_sense_are_refused(load_rows, adult_rows, changes, message):
    with pytest.raises(ValueError, match=message):
        load_rows({"train": adult_rows(3, **changes), "test": adult_rows(3)})
