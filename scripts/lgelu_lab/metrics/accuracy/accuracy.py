"""The share of predictions that are right, a module of `evaluate`: load("scripts/lgelu_lab/metrics/accuracy")."""

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """{"accuracy": share of `predictions` that are their `references`}; both are classes, (N,) integers."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="The share of predictions that are right.",
            citation="",
            inputs_description="predictions, references: classes, (N,) integers",
            features=datasets.Features({name: datasets.Value("int64") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.equal(predictions, references)))}
