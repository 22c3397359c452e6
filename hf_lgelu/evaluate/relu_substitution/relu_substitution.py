"""The comparison of a smooth network with its ReLU network, as a module that `evaluate.load` takes."""

from typing import Any

import datasets
import evaluate
import torch
from torch.distributions import Binomial

from hf_lgelu.comparing.comparison import OutputComparison

_DESCRIPTION = "How much of a network's predictions stays where ReLU takes the place of its smooth gates."

_INPUTS = """
Args:
    predictions1: of the original network: logits (samples, classes), or classes (samples,).
    predictions2: the same of the ReLU network.
    references: the right classes (samples,); optional, for McNemar's test.

Returns:
    unchanged_predictions: the share of samples that keep their class.
    max_logit_change: the largest change of a logit.
    kl: the mean KL(original ‖ ReLU) of the classes' probabilities, in nats.
    only_right_1, only_right_2: samples that only one network gets right.
    mcnemar_p: how probable so uneven counts are if both networks are right equally often (exact, two-sided).
"""


class ReluSubstitution(evaluate.Comparison):
    """The share of unchanged predictions, the largest logit change, the KL and McNemar's test, by sample."""

    def _info(self) -> evaluate.ComparisonInfo:
        forms = datasets.Sequence(datasets.Value("float32")), datasets.Value("float64")  # as int64, 0.7 would be 0
        return evaluate.ComparisonInfo(
            module_type="comparison",
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=[datasets.Features({"predictions1": form, "predictions2": form}) for form in forms],
        )

    def compute(self, *, references: Any = None, **others: Any) -> dict[str, float] | None:
        """The measures of all samples; `references` are optional, which no feature of evaluate can be."""
        return super().compute(labels=references, **others)

    def _compute(self, predictions1: Any, predictions2: Any, labels: Any = None) -> dict[str, float]:
        original, changed = torch.tensor(predictions1), torch.tensor(predictions2)
        if original.ndim == 1:
            classes, other_classes = original, changed
            found = {"unchanged_predictions": (original == changed).double().mean().item()}
        else:
            classes, other_classes = original.argmax(-1), changed.argmax(-1)
            total = OutputComparison().add(original, changed, kind="scores")
            found = {"unchanged_predictions": total.agreement, "max_logit_change": total.largest_change, "kl": total.kl}
        if labels is None:
            return found
        right, other_right = classes == torch.as_tensor(labels), other_classes == torch.as_tensor(labels)
        lost, won = (right & ~other_right).sum().item(), (other_right & ~right).sum().item()
        fewer = torch.arange(min(lost, won) + 1, dtype=torch.float64)
        tail = Binomial(lost + won, torch.tensor(0.5, dtype=torch.float64)).log_prob(fewer).exp().sum().item()
        return {**found, "only_right_1": lost, "only_right_2": won, "mcnemar_p": min(1.0, 2 * tail)}
