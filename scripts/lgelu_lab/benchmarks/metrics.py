"""What a benchmark is scored by: the functions that Trainer calls with the predictions of every process, gathered."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import EvalPrediction

from hf_lgelu.networks.outputs import IGNORED_LABEL


def classification_scores(prediction: EvalPrediction) -> dict[str, float]:
    """{"accuracy": share of rows whose largest logit is that of their label}; Trainer's `compute_metrics`.

    `prediction` holds logits (N, classes) and labels (N,); of equal logits the first class counts.
    """
    return {"accuracy": float(np.mean(np.argmax(prediction.predictions, axis=-1) == prediction.label_ids))}


def language_scores(prediction: EvalPrediction) -> dict[str, float]:
    """{"perplexity": exp of the mean negative log-likelihood of a predicted token}; Trainer's `compute_metrics`.

    `prediction` holds the result of `token_losses`, (N, T − 1), and labels (N, T); where a label is -100,
    nothing is predicted. Summed in float64, so that it is exact for any division into batches and processes.
    """
    predicted = prediction.label_ids[:, 1:] != IGNORED_LABEL
    sums = np.where(predicted, prediction.predictions, 0).sum(axis=1, dtype=np.float64)
    with np.errstate(over="ignore"):  # inf beyond the largest float64
        return {"perplexity": float(np.exp(sums.sum() / predicted.sum()))}


def row_scores(prediction: EvalPrediction) -> dict[str, list[float]]:
    """{"loss": nats of each row, "correct": 1 where its class is found}; of text the mean loss of its tokens alone."""
    labels, predictions = prediction.label_ids, np.asarray(prediction.predictions, dtype=np.float64)
    if labels.ndim > 1:
        return {"loss": (predictions.sum(axis=1) / (labels[:, 1:] != IGNORED_LABEL).sum(axis=1)).round(6).tolist()}
    losses = torch.nn.functional.cross_entropy(*map(torch.from_numpy, (predictions, labels)), reduction="none")
    return {
        "loss": losses.numpy().round(6).tolist(),
        "correct": (predictions.argmax(axis=1) == labels).astype(int).tolist(),
    }


@torch.no_grad()
def token_losses(logits: Any, labels: Tensor) -> Tensor:
    """The negative log-likelihood of each predicted token; Trainer's `preprocess_logits_for_metrics`.

    An evaluation then keeps one number a token, and not one for each of its possible values.

    Args:
        logits: (batch, T, vocabulary), or a tuple that has them first.
        labels: (batch, T), int64; those at t + 1 are what position t predicts.

    Returns:
        (batch, T − 1), float32, in nats, on the logits' device; 0 where the label is -100.
    """
    if isinstance(logits, tuple | list):
        logits = logits[0]
    # Row by row: a float32 copy of a batch of logits would be the largest tensor of the evaluation.
    return torch.stack(
        [
            torch.nn.functional.cross_entropy(
                row[:-1].float(), wanted[1:], reduction="none", ignore_index=IGNORED_LABEL
            )
            for row, wanted in zip(logits, labels, strict=True)
        ]
    )
