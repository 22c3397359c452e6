"""Accuracy as a module of `evaluate`."""

from typing import Any

import datasets
import evaluate
import numpy as np

_DESCRIPTION = "The share of predictions that are the reference."
_INPUTS = """
Args:
    predictions: class numbers.
    references: class numbers.
Returns:
    accuracy: in [0, 1].
"""


class Accuracy(evaluate.Metric):
    """{"accuracy": share of predictions that equal their reference}."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
