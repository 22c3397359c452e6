"""Perplexity from sums, a module of `evaluate`: load("scripts/lgelu_lab/metrics/perplexity")."""

import datasets
import evaluate
import numpy as np


class Perplexity(evaluate.Metric):
    """{"perplexity": exp of the mean negative log-likelihood of a predicted token}.

    `predictions` are the sums of the negative log-likelihoods in each row of text, in nats, (N,) float64;
    `references` are how many tokens were predicted there. Every token counts alike, however the text was divided.
    The perplexity is inf beyond the largest float64, and nan where a sum is.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="exp of the mean negative log-likelihood of a predicted token.",
            citation="",
            inputs_description="predictions: sums of negative log-likelihoods in nats; references: tokens predicted",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        with np.errstate(over="ignore"):
            return {"perplexity": float(np.exp(np.sum(predictions) / np.sum(references)))}
