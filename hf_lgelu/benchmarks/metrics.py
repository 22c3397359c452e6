"""What a benchmark is scored by."""

import numpy as np
from transformers import EvalPrediction


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """{"accuracy": share of rows whose largest logit is that of their label}; Trainer's `compute_metrics`.

    `prediction` holds logits (N, classes) and labels (N,); of equal logits the first class counts.
    """
    return {"accuracy": float(np.mean(np.argmax(prediction.predictions, axis=-1) == prediction.label_ids))}
