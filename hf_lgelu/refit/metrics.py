"""Scores against labels, where the inputs bring some: accuracy, and perplexity of causal language models."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_lgelu.refit.units import IGNORED_LABEL


@dataclass
class MetricSums:
    """What the score of a set is made of, added up; all zero without labels."""

    correct: int = 0
    labelled: int = 0
    loss: float = 0.0
    predicted: int = 0

    def __add__(self, other: "MetricSums") -> "MetricSums":
        return MetricSums(
            self.correct + other.correct,
            self.labelled + other.labelled,
            self.loss + other.loss,
            self.predicted + other.predicted,
        )

    def values(self) -> dict[str, float]:
        """{"accuracy": …} or {"perplexity": …}, empty without labels."""
        found = {}
        if self.labelled:
            found["accuracy"] = self.correct / self.labelled
        if self.predicted:
            found["perplexity"] = math.exp(min(self.loss / self.predicted, 700.0))
        return found


def metric_sums(output: Tensor, labels: Tensor | None, counted: Tensor | None, model_class: str) -> MetricSums:
    """The sums of one batch.

    Args:
        output: logits (…, classes); a single column is no choice between classes, and has no score.
        labels: (…) int; −100 does not count. Of a causal language model the tokens themselves, not shifted. Labels of
            another shape or kind are none.
        counted: (…) bool, which predictions are no padding; None for all.
        model_class: name of the model's class.
    """
    if labels is None or labels.is_floating_point() or labels.shape != output.shape[:-1] or output.shape[-1] < 2:
        return MetricSums()
    labels = labels.to(output.device)
    if counted is not None:
        labels = labels.masked_fill(~counted, IGNORED_LABEL)
    if model_class in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return _next_token(output, labels)
    valid = labels != IGNORED_LABEL
    return MetricSums(correct=int((output.argmax(-1) == labels)[valid].sum()), labelled=int(valid.sum()))


def _next_token(output: Tensor, labels: Tensor) -> MetricSums:
    loss, predicted = 0.0, 0
    for logits, tokens in zip(output, labels, strict=True):  # a sequence at a time: vocabularies are large
        following = tokens[1:]
        valid = int((following != IGNORED_LABEL).sum())
        if valid:
            summed = F.cross_entropy(logits[:-1].float(), following, ignore_index=IGNORED_LABEL, reduction="none")
            loss += summed.sum(dtype=torch.float64 if summed.device.type != "mps" else None).item()
            predicted += valid
    return MetricSums(loss=loss, predicted=predicted)
