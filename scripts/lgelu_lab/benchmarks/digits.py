"""8x8 handwritten digits from scikit-learn: no download, seconds a run. Not in the paper."""

import numpy as np

from hf_lgelu.environment import require
from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions, RawSplit, Standardizer, prepare, stratified_holdout
from lgelu_lab.benchmarks.mlp import mlp_benchmark
from lgelu_lab.benchmarks.source import Origin

TEST_FRACTION = 0.2


def load_digits(options: DataOptions | None = None) -> BenchmarkData:
    """1,797 images of 64 pixels in 10 classes; each pixel is standardized by the training rows.

    A stratified 20 %, chosen by `options.split_seed`, is the test split. Pixels that are constant in
    the training rows are 0. `options.data_dir` has no part in it.

    Raises ImportError without scikit-learn.
    """
    options = options or DataOptions()
    pixels, labels = require("sklearn.datasets", "benchmarks").load_digits(return_X_y=True)
    parts = stratified_holdout(labels, TEST_FRACTION, options.split_seed)
    train, test = (RawSplit(labels[part], pixels[part].__getitem__) for part in parts)
    return prepare(
        train,
        test,
        lambda rows: Standardizer.fit(rows, per_column=True),
        [str(digit) for digit in np.unique(labels)],
        options,
        Origin("scikit-learn"),
        eval_split=f"test (held out, {TEST_FRACTION * 100:g} % of the rows)",
    )


DIGITS = mlp_benchmark("mlp-digits", load=load_digits, train_batch_size=64, epochs=60)
