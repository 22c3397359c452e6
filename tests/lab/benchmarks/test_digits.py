"""The digits, against scikit-learn's arrays and a loop over Python floats."""

from collections import Counter

import numpy as np
from lgelu_lab.benchmarks.digits import load_digits


def original_rows(data, rows):
    """The pixels before standardization, with the constant ones at 0."""
    mean, deviation = (np.array(data.preprocessing[name]) for name in ("mean", "deviation"))
    return [tuple(row) for row in np.rint(rows.features.numpy() * deviation + mean).astype(int).tolist()]


def test_train_and_test_are_the_whole_set_once():
    from sklearn.datasets import load_digits as sklearn_digits

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
