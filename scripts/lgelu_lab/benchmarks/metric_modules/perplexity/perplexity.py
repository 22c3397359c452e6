"""Perplexity of predicted tokens as a module of `evaluate`."""

from typing import Any

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """
exp of the mean negative log-likelihood of a predicted token, over all tokens of all texts: every token counts
alike, and a text as much as it has tokens.
"""
_INPUTS = """
Args:
    predictions: for each text, the sum of the negative log-likelihoods of its predicted tokens, in nats.
    references: for each text, the number of its predicted tokens.
Returns:
    perplexity: at least 1 for a probability model; inf beyond the largest float64, and nan for a sum that is nan.
"""


class Perplexity(evaluate.Metric):
    """{"perplexity": exp(Σ sums / Σ counts)}, in float64."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        mean = np.sum(np.asarray(predictions, dtype=np.float64)) / np.sum(np.asarray(references))
        with np.errstate(over="ignore"):
            return {"perplexity": float(np.exp(mean))}
