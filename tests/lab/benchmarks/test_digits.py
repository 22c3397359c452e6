"""The digits, against scikit-learn's arrays and a loop over Python floats."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from lgelu_lab.benchmarks.data import DataOptions
from lgelu_lab.benchmarks.digits import load_digits
from sklearn.datasets import load_digits as sklearn_digits


def original_rows(data, rows):
    """The pixels before standardization, with the constant ones at 0."""
    mean, deviation = (np.array(data.preprocessing[name]) for name in ("mean", "deviation"))
    return [tuple(row) for row in np.rint(rows.features.numpy() * deviation + mean).astype(int).tolist()]


def test_train_and_test_are_the_whole_set_once():
    data = load_digits()
    pixels, labels = sklearn_digits(return_X_y=True)
    constant = {column for column in range(64) if data.preprocessing["deviation"][column] == 0}
    expected = [
        (*(0 if i in constant else int(value) for i, value in enumerate(row)), int(label))
        for row, label in zip(pixels.tolist(), labels, strict=True)
    ]
    found = []
    for rows in (data.train, data.eval):
        for row, label in zip(original_rows(data, rows), rows.labels.tolist(), strict=True):
            found.append((*(0 if i in constant else value for i, value in enumerate(row)), label))
    assert Counter(found) == Counter(expected)
    for label in range(10):
        assert int((data.eval.labels == label).sum()) == round(0.2 * int(np.sum(labels == label)))
    assert (data.train.num_features, data.num_labels) == (64, 10)
    assert data.eval_split == "test (held out, 20 % of the rows)"


def test_statistics_are_those_of_the_training_rows():
    data = load_digits(DataOptions(max_train_samples=200))
    assert len(data.train) == 200
    features = data.train.features.to(torch.float64)
    for column, deviation in enumerate(data.preprocessing["deviation"]):
        values = features[:, column].tolist()
        mean = math.fsum(values) / 200
        assert mean == pytest.approx(0, abs=1e-6)
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / 200)
        assert spread == pytest.approx(1.0 if deviation else 0.0, abs=1e-6)
    assert min(data.preprocessing["deviation"]) == 0  # the first pixel is never inked
    assert torch.isfinite(data.eval.features).all()


def test_the_split_seed_decides_which_rows_are_held_out():
    first, again, other = (load_digits(DataOptions(split_seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(first.eval.features, again.eval.features)
    assert original_rows(first, first.eval) != original_rows(other, other.eval)
