"""Which rows train, select and test: seeded, and the same with every version of numpy."""

from dataclasses import dataclass

import numpy as np

from lgelu_lab.benchmarks.options import DataOptions


@dataclass(frozen=True)
class RowChoice:
    """Row numbers: `train` and `validation` in the training split, `test` in the test split.

    `validation` is None where the test split selects.
    """

    train: np.ndarray
    validation: np.ndarray | None
    test: np.ndarray


def choose_rows(train_labels: np.ndarray, test_size: int, options: DataOptions) -> RowChoice:
    """Hold out a validation part if `options` ask for one, then apply the limits on sample counts."""
    train, validation = np.arange(len(train_labels)), None
    if options.validation_fraction > 0:
        train, validation = stratified_holdout(train_labels, options.validation_fraction, options.split_seed)
        validation = _first(validation, options.max_eval_samples, options.split_seed)
    return RowChoice(
        train=_first(train, options.max_train_samples, options.split_seed),
        validation=validation,
        test=_first(np.arange(test_size), options.max_eval_samples, options.split_seed),
    )


def stratified_holdout(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers (kept, held out), ascending; of each class, `fraction` of its rows, rounded, is held out.

    Args:
        labels: (N,), integers.
        fraction: in (0, 1).
        seed: of the permutation within each class.

    Raises ValueError if that leaves either part empty.
    """
    random = _generator(seed)
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        held_out[rows[: round(fraction * len(rows))]] = True
    if held_out.all() or not held_out.any():
        raise ValueError(
            f"holding out a fraction of {fraction:g} of each class leaves an empty part: there are {len(labels)} rows "
            f"in {len(np.unique(labels))} classes. Choose a fraction that is at least one row of a class"
        )
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _first(rows: np.ndarray, limit: int | None, seed: int) -> np.ndarray:
    if limit is None or limit >= len(rows):
        return rows
    return _generator(seed).permutation(rows)[:limit]


def _generator(seed: int) -> np.random.RandomState:
    # numpy promises that RandomState's stream never changes, and promises no such thing of default_rng.
    return np.random.RandomState(seed)
