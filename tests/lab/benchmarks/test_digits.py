"""The digits, against scikit-learn's arrays."""

import numpy as np
from lgelu_lab.benchmarks.data import stratified_holdout
from lgelu_lab.benchmarks.digits import load_digits


def test_train_and_test_are_the_whole_set_once():
    from sklearn.datasets import load_digits as sklearn_digits

    data = load_digits()
    pixels, labels = sklearn_digits(return_X_y=True)
    kept, held_out = stratified_holdout(labels, 0.2, 0)
    varies = pixels[kept].std(axis=0) > 0
    for rows, numbers in ((data.train, kept), (data.eval, held_out)):
        expected = np.zeros((len(numbers), 64))
        moved = pixels[numbers] - pixels[kept].mean(axis=0)
        expected[:, varies] = moved[:, varies] / pixels[kept].std(axis=0)[varies]
        np.testing.assert_allclose(rows.features, expected, rtol=1e-5, atol=1e-6)
        assert rows.labels.tolist() == labels[numbers].tolist()
    for label in range(10):
        assert int((data.eval.labels == label).sum()) == round(0.2 * int(np.sum(labels == label)))
    assert data.train.num_features == 64
    assert data.eval_split == "test (held out, 20 % of the rows)"
