"""Which rows are chosen: disjoint, stratified, and the same every time."""

import numpy as np
from lgelu_lab.benchmarks.data import DataOptions, choose_rows, stratified_holdout


def test_a_split_stays_what_it_was():
    """Row numbers written down once: a change would make old records incomparable with new ones."""
    assert stratified_holdout(np.array([0, 1] * 10), 0.3, seed=0)[1].tolist() == [3, 4, 7, 8, 11, 16]


def test_limits_apply_to_each_part_and_start_from_one_permutation():
    few, more = (choose_rows(100, 50, DataOptions(max_train_samples=n, max_eval_samples=n)) for n in (5, 20))
    assert [len(part) for part in few] == [5, 5]
    assert few[0].tolist() == more[0].tolist()[:5]
    assert few[0].tolist() != sorted(few[0])
    assert len(set(more[1])) == 20
    assert max(more[1]) < 50
