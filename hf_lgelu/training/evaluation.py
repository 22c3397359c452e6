"""Comparing a model with its ReLU substitution, batch by batch.

Both sets of logits are seen in one pass over the data, so the comparison needs no memory for the
logits of a whole evaluation set, and travels through Trainer's own gathering: exact over an uneven
last batch, and over several processes, except that there, as in Trainer's own loss, the mean loss of
a batch that was filled up counts the samples that fill it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import EvalPrediction

_LOSS, _RELU_LOSS, _LARGEST_CHANGE, _UNCHANGED, _PREDICTIONS = range(5)


def compare_outputs(
    loss: Tensor | None, logits: Any, relu_loss: Tensor | None, relu_logits: Any, labels: Any
) -> Tensor:
    """(batch, 5) float32 on the logits' device: loss, loss substituted, largest logit change, predictions
    that stay the same, predictions made. Positions labelled -100 do not count. A single output, as of a
    regression, is no prediction of a class: its largest is always the first."""
    before, after = first_tensor(logits), first_tensor(relu_logits)
    batch_size = before.shape[0]
    change = (before.float() - after.float()).abs_()
    change.masked_fill_(before == after, 0)  # both are the -inf of a masked class: the difference is NaN
    same = before.argmax(-1) == after.argmax(-1)
    counted = torch.ones_like(same)
    if isinstance(labels, Tensor) and labels.shape == same.shape:
        counted = labels != -100
        change.masked_fill_(~counted.unsqueeze(-1), 0)
    rows = torch.empty(batch_size, 5, dtype=torch.float32, device=before.device)
    rows[:, _LOSS] = float("nan") if loss is None else loss
    rows[:, _RELU_LOSS] = float("nan") if relu_loss is None else relu_loss
    rows[:, _LARGEST_CHANGE] = change.reshape(batch_size, -1).amax(dim=1)
    rows[:, _UNCHANGED] = (same & counted).reshape(batch_size, -1).sum(dim=1)
    rows[:, _PREDICTIONS] = counted.reshape(batch_size, -1).sum(dim=1) if before.shape[-1] > 1 else 0
    return rows


def comparison_metrics(rows: np.ndarray, prefix: str) -> dict[str, float]:
    """Trainer metrics of all rows of `compare_outputs`: both losses, the largest logit change, and, if there is a
    prediction, the share that substitution leaves unchanged."""
    rows = rows.astype(np.float64)
    metrics = {f"{prefix}_relu_max_logit_change": float(rows[:, _LARGEST_CHANGE].max())}
    predictions = rows[:, _PREDICTIONS].sum()
    if predictions > 0:
        metrics[f"{prefix}_relu_unchanged_predictions"] = float(rows[:, _UNCHANGED].sum() / predictions)
    if not np.isnan(rows[:, _LOSS]).all():
        metrics[f"{prefix}_loss"] = float(rows[:, _LOSS].mean())
        metrics[f"{prefix}_relu_loss"] = float(rows[:, _RELU_LOSS].mean())
    return metrics


def on_both(preprocess: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A `preprocess_logits_for_metrics` for (rows, logits, substituted logits)."""

    def preprocess_both(packed: tuple[Any, ...], labels: Any) -> tuple[Any, ...]:
        return packed[0], *(preprocess(logits, labels) for logits in packed[1:])

    return preprocess_both


def metrics_of_both(
    compute_metrics: Callable[[EvalPrediction], dict[str, float]], prefix: str
) -> Callable[[EvalPrediction], dict[str, float]]:
    """A `compute_metrics` for (rows, logits, substituted logits): every metric, and again as relu_<metric>."""

    def compute_both(prediction: EvalPrediction) -> dict[str, float]:
        rows, logits, relu_logits = prediction.predictions
        relu_losses = None if prediction.losses is None else rows[:, _RELU_LOSS]

        def of(predictions: Any, losses: Any) -> dict[str, float]:
            metrics = compute_metrics(
                EvalPrediction(
                    predictions=predictions, label_ids=prediction.label_ids, inputs=prediction.inputs, losses=losses
                )
            )
            return {name.removeprefix(f"{prefix}_"): value for name, value in metrics.items()}

        as_it_is, substituted = of(logits, prediction.losses), of(relu_logits, relu_losses)
        return {**as_it_is, **{f"relu_{name}": value for name, value in substituted.items()}}

    return compute_both


def first_tensor(logits: Any) -> Tensor:
    """The logits proper: a model with several outputs has them first."""
    while isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        raise ValueError(
            "the substitution can be compared only on logits of shape (batch, ..., classes); the model's first output "
            f"is {tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__}. Pass "
            "report_substitution=False to evaluate as it is"
        )
    return logits
