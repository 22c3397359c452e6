"""Options that make no sense are refused."""

import pytest
from lgelu_lab.benchmarks.data import DataOptions


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data_dir": 3}, TypeError, "data_dir must be a path or None, got int"),
        ({"max_train_samples": 0}, ValueError, "max_train_samples must be at least 1, got 0; None uses every row"),
        ({"max_eval_samples": 1.5}, TypeError, "max_eval_samples must be an integer, got 1.5"),
        ({"max_train_samples": True}, TypeError, "max_train_samples must be an integer, got True"),
        ({"validation_fraction": 1.0}, ValueError, r"validation_fraction must lie in \[0, 1\), got 1.0"),
        ({"validation_fraction": -0.1}, ValueError, r"validation_fraction must lie in \[0, 1\)"),
        ({"validation_fraction": float("nan")}, ValueError, r"validation_fraction must lie in \[0, 1\)"),
        ({"validation_fraction": "0.1"}, TypeError, "validation_fraction must be a number, got str"),
        ({"split_seed": -1}, ValueError, "split_seed must be at least 0"),
    ],
)
def test_a_wrong_option_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        DataOptions(**changes)
