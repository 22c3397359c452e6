"""The comparison of a model with its ReLU substitution during an evaluation of Trainer.

Both networks run on each batch, so the logits of the whole evaluation set need no memory. The numbers of each sample go
through Trainer's own gathering, which is exact for an uneven last batch and for several processes. As in Trainer's own
loss, the mean loss over several processes counts the samples that fill up a last batch.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import EvalPrediction

from hf_lgelu.comparing.output_comparison import difference, same_classes
from hf_lgelu.networks.outputs import IGNORED_LABEL, classes_last, has_classes, labels_of_predictions, named_tensors

_LOSS, _RELU_LOSS, _LARGEST_CHANGE, _UNCHANGED, _PREDICTIONS, _COSINE, _LIVE, _UNITS = range(8)
_NO_COSINE = 2.0

_COLLECTED = ("_metrics", "_stored_metrics", "accum_loss_components")


def compare_samples(
    loss: Tensor | None, outputs: Any, relu_loss: Tensor | None, relu_outputs: Any, labels: Any, batch_size: int,
    padding: int | None = None, *, embeds: bool = False, mask: Any = None, live_units: tuple[int, int] = (0, 0),
) -> Tensor:  # fmt: skip
    """(batch, 8) float32: loss, the same with ReLU, largest change, unchanged predictions, predictions, cosine, and for
    each sample an even part of the `live_units`: the ReLUs' outputs that are not zero, and all outputs.

    The first tensor of the outputs is compared; without a tensor, the largest change is −1. A prediction is the class
    with the largest score at one position. A position with the label −100 counts for nothing, and real labels (a
    regression) make no prediction; labels stand where they are predicted. A row of integers (generated tokens) is one
    prediction, filled up with `padding`. Embeddings (`embeds`) make no prediction: their cosine counts, of several
    positions that of their means, without those that `mask` leaves out.
    """
    before, after = (next((tensor for _, tensor in named_tensors(given)), None) for given in (outputs, relu_outputs))
    device = next((tensor.device for tensor in (before, loss) if tensor is not None), torch.device("cpu"))
    rows = torch.zeros(batch_size, 8, dtype=torch.float32, device=device)
    rows[:, _LIVE], rows[:, _UNITS] = (count / batch_size for count in live_units)
    rows[:, _LOSS] = float("nan") if loss is None else loss
    rows[:, _RELU_LOSS] = float("nan") if relu_loss is None else relu_loss
    rows[:, _LARGEST_CHANGE], rows[:, _COSINE] = -1, _NO_COSINE
    if before is None or after is None:
        return rows
    counted = torch.empty(0, dtype=torch.bool)
    if not before.is_floating_point():
        if padding is not None and before.ndim == after.ndim == 2:  # each batch is as long as its own longest row
            length = max(before.shape[1], after.shape[1])
            before, after = (F.pad(each, (0, length - each.shape[1]), value=padding) for each in (before, after))
        counted = torch.ones(before.shape[:1] or (1,), dtype=torch.bool, device=before.device)
        is_alike = before.shape == after.shape
        same = (before == after).reshape(len(counted), -1).all(dim=1) if is_alike else ~counted
    elif before.shape == after.shape:
        before, after = classes_last(before), classes_last(after)
        change = difference(after.float(), before.float()).abs_().amax(-1)
        same = counted
        if embeds:
            of_mask = isinstance(mask, Tensor) and mask.shape == before.shape[:-1]
            weights = mask.float() if of_mask else before.new_ones(before.shape[:-1], dtype=torch.float32)
            # Sums point where means do.
            sums = [(each.float() * weights[..., None]).flatten(1, -2).sum(1) if each.ndim > 2 else each.float()
                    for each in (before, after)]  # fmt: skip
            rows[:, _COSINE] = F.cosine_similarity(*sums, dim=-1)
        elif has_classes(before):
            same, counted = same_classes(before, after), torch.ones_like(change, dtype=torch.bool)
            if isinstance(labels, Tensor) and labels.is_floating_point():
                counted = torch.zeros_like(counted)
            elif isinstance(labels, Tensor) and labels.shape == counted.shape:
                counted = labels != IGNORED_LABEL
                change = change.masked_fill(~counted, 0)
        rows[:, _LARGEST_CHANGE] = _by_sample(change, batch_size).amax(dim=1)
    if counted.numel():
        rows[:, _UNCHANGED] = _by_sample(same & counted, batch_size).sum(dim=1)
        rows[:, _PREDICTIONS] = _by_sample(counted, batch_size).sum(dim=1)
    return rows


def _by_sample(values: Tensor, batch_size: int) -> Tensor:
    """(batch, -1); values whose first axis is not that of the samples all belong to the first one."""
    if values.dim() and len(values) == batch_size:
        return values.reshape(batch_size, -1)
    whole = values.new_zeros(batch_size, max(1, values.numel()))
    whole[0, : values.numel()] = values.flatten()
    return whole


def comparison_metrics(rows: np.ndarray, prefix: str, loss: float | None = None) -> dict[str, float]:
    """The metrics of all rows of `compare_samples`: loss with ReLU, largest change, share of unchanged predictions or,
    of embeddings, their mean cosine, and share of the ReLUs' outputs that are not zero.

    `loss` is Trainer's loss of the same rows. If it is finite, Trainer has left out rows whose loss is not
    (`logging_nan_inf_filter`; a batch without a label), and the loss with ReLU leaves out the same rows.
    """
    rows = rows.astype(np.float64)
    metrics: dict[str, float] = {}
    change = rows[:, _LARGEST_CHANGE].max()
    if not change < 0:  # NaN is reported
        metrics[f"{prefix}_relu_max_logit_change"] = float(change)
    predictions = rows[:, _PREDICTIONS].sum()
    if predictions > 0:
        metrics[f"{prefix}_relu_unchanged_predictions"] = float(rows[:, _UNCHANGED].sum() / predictions)
    cosines = rows[rows[:, _COSINE] != _NO_COSINE, _COSINE]
    if len(cosines):
        metrics[f"{prefix}_relu_cosine"] = float(cosines.mean())
    if rows[:, _UNITS].any():
        metrics[f"{prefix}_relu_live_units"] = float(rows[:, _LIVE].sum() / rows[:, _UNITS].sum())
    if loss is not None:
        counted = np.isfinite(rows[:, _LOSS]) | (not np.isfinite(loss))
        metrics[f"{prefix}_relu_loss"] = float(rows[counted, _RELU_LOSS].mean())
    return metrics


def metrics_of_both(
    compute_metrics: Callable[[EvalPrediction], dict[str, float]], prefix: str
) -> Callable[[EvalPrediction], dict[str, float]]:
    """A `compute_metrics` for (rows, logits, substituted logits): every metric, and again as relu_<metric>."""

    def compute_both(prediction: EvalPrediction) -> dict[str, float]:
        rows, logits, relu_logits = prediction.predictions
        relu_losses = None if prediction.losses is None else rows[:, _RELU_LOSS]
        given = prediction.label_ids, prediction.inputs
        kept = copy.deepcopy(given)  # a metric may write into its labels: -100 to a token that can be decoded

        def of(predictions: Any, losses: Any, label_ids: Any, inputs: Any) -> dict[str, float]:
            metrics = compute_metrics(
                EvalPrediction(predictions=predictions, label_ids=label_ids, inputs=inputs, losses=losses)
            )
            return {name.removeprefix(f"{prefix}_"): value for name, value in metrics.items()}

        as_it_is, substituted = of(logits, prediction.losses, *given), of(relu_logits, relu_losses, *kept)
        return {**as_it_is, **{f"relu_{name}": value for name, value in substituted.items()}}

    return compute_both


def metrics_of_module(
    module: Any, model: nn.Module, prediction: EvalPrediction, compute_result: bool
) -> dict[str, float] | None:
    """What a module of `evaluate` says of predictions and labels: of predicted classes where labels are integers.

    Labels of −100 do not count, and those of a causal language model stand where they are predicted.
    `compute_result` is Trainer's, with `batch_eval_metrics`: false before the last batch.
    """
    found, labels = (
        torch.as_tensor(given[0] if isinstance(given, tuple | list) else given)
        for given in (prediction.predictions, prediction.label_ids)
    )
    labels = labels_of_predictions(labels, model)
    if found.shape != labels.shape:
        found = found.view_as(labels) if labels.is_floating_point() else found.argmax(-1)
    counted = labels != IGNORED_LABEL
    module.add_batch(predictions=found[counted], references=labels[counted])
    return module.compute() if compute_result else None


@contextmanager
def pass_undone(trainer: Any) -> Iterator[None]:
    """A block after which torch's random state, and the numbers that a trainer's loss collects, are as before.

    A second pass then draws what the first drew, and adds nothing to these numbers, which the trainers of TRL and
    sentence-transformers average at the end of an evaluation.
    """
    device = next((parameter.device for parameter in trainer.model.parameters()), torch.device("cpu"))
    is_cpu = device.type in ("cpu", "meta")
    kept = {name: vars(trainer)[name] for name in _COLLECTED if name in vars(trainer)}
    vars(trainer).update(copy.deepcopy(kept))
    with torch.random.fork_rng([] if is_cpu else [device], device_type="cuda" if is_cpu else device.type):
        try:
            yield
        finally:
            vars(trainer).update(kept)
