"""Adult, or census income (Becker and Kohavi, 1996): the paper's MLP/Adult."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions, RawSplit, Standardizer, prepare, stratified_holdout
from lgelu_lab.benchmarks.mlp import mlp_benchmark
from lgelu_lab.benchmarks.source import load_splits

HUB_ID = "scikit-learn/adult-census-income"
FOLDER = "adult"
LABEL_NAMES = ("<=50K", ">50K")
# fnlwgt, a census weight, says little about income; it stays because the reference reproduction has it.
NUMERIC_COLUMNS = ("age", "fnlwgt", "education.num", "capital.gain", "capital.loss", "hours.per.week")
CATEGORY_COLUMNS = (
    *("workclass", "education", "marital.status", "occupation"),
    *("relationship", "race", "sex", "native.country"),
)
LABEL_COLUMN = "income"
MISSING = "?"
TEST_FRACTION = 1 / 3
"""Of the training rows, where there is no test split: UCI's own share is 16,281 of 48,842."""


def load_adult(options: DataOptions | None = None) -> BenchmarkData:
    """Numbers standardized, categories one-hot; both by what the training rows hold.

    The features are NUMERIC_COLUMNS, then for each of CATEGORY_COLUMNS one column a category, sorted.
    `?` is a category of its own; a category that no training row has is all zeros. Of a copy without a
    test split, which the Hub's is, a stratified third chosen by `options.split_seed` is the test split.

    Raises ValueError for missing data, an unknown income or a number that is none;
    RuntimeError if the Hub cannot be reached.
    """
    options = options or DataOptions()
    columns = (*NUMERIC_COLUMNS, *CATEGORY_COLUMNS, LABEL_COLUMN)
    found = load_splits(FOLDER, HUB_ID, options.data_dir, splits=("train",), columns=columns, optional_splits=("test",))
    train_frame, test_split = found.splits["train"].to_pandas(), "test"
    train_labels = _labels(train_frame[LABEL_COLUMN])
    if "test" in found.splits:
        test_frame = found.splits["test"].to_pandas()
        test_labels = _labels(test_frame[LABEL_COLUMN])
    else:
        kept, held_out = stratified_holdout(train_labels, TEST_FRACTION, options.split_seed)
        test_frame, test_labels = train_frame.take(held_out), train_labels[held_out]
        train_frame, train_labels = train_frame.take(kept), train_labels[kept]
        test_split = "test (held out, 1/3 of the rows)"
    return prepare(
        RawSplit(train_labels, train_frame.take),
        RawSplit(test_labels, test_frame.take),
        AdultEncoder.fit,
        LABEL_NAMES,
        options,
        found.origin,
        test_split,
    )


@dataclass(frozen=True)
class AdultEncoder:
    """Data frame → features; `vocabulary` maps a column to its categories, in the order of their columns."""

    numbers: Standardizer
    vocabulary: Mapping[str, Sequence[str]]

    @classmethod
    def fit(cls, frame: Any) -> "AdultEncoder":
        """Take the statistics and categories of a training frame."""
        vocabulary = {name: sorted(_categories(frame[name]).unique()) for name in CATEGORY_COLUMNS}
        return cls(Standardizer.fit(_numbers(frame), per_column=True), vocabulary)

    def encode(self, frame: Any) -> np.ndarray:
        """(N, 6 + number of categories) float32."""
        blocks = [self.numbers.encode(_numbers(frame))]
        for name, known in self.vocabulary.items():
            blocks.append((_categories(frame[name]).to_numpy()[:, None] == np.array(known)).astype(np.float32))
        return np.concatenate(blocks, axis=1)


def _numbers(frame: Any) -> np.ndarray:
    for name in NUMERIC_COLUMNS:
        column = frame[name]
        if column.dtype.kind not in "iuf":
            raise ValueError(f"column {name!r} of {FOLDER} must hold numbers, got dtype {column.dtype}")
        if not np.isfinite(column.to_numpy(np.float64)).all():
            raise ValueError(f"column {name!r} of {FOLDER} holds a missing or infinite number")
    return frame[list(NUMERIC_COLUMNS)].to_numpy(np.float64)


def _categories(column: Any) -> Any:
    # UCI's own files put a space before each value, and some readers turn `?` into a null.
    return column.fillna(MISSING).astype(str).str.strip()


def _labels(income: Any) -> np.ndarray:
    """(N,) int64, 1 above 50K. UCI's test file has a dot behind the value."""
    values = income.astype(str).str.strip().str.removesuffix(".")
    unknown = sorted(set(values.unique()) - set(LABEL_NAMES))
    if unknown:
        raise ValueError(
            f"column {LABEL_COLUMN!r} of {FOLDER} holds {', '.join(map(repr, unknown))}; "
            f"accepted: {' and '.join(map(repr, LABEL_NAMES))}, with or without a final dot"
        )
    return (values == LABEL_NAMES[1]).to_numpy().astype(np.int64)


ADULT = mlp_benchmark("mlp-adult", load=load_adult, train_batch_size=512, epochs=50)
