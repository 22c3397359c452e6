"""The distance of a network from another, as numbers in a record."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_lgelu.formats import DETECTION, NONE, RELATIVE_ERROR, main_measures, score, significant


@dataclass(frozen=True)
class NetChange:
    """The distance of a network from the original on the same rows.

    For class scores, KL and agreement count; for embeddings, cosine and neighbours; for other values, the relative
    error.

    Args:
        kl: mean KL(original ‖ network) in nats per prediction; None where the outputs are no logits.
        agreement: share of predictions, 0 to 1, with the original's argmax. It has a meaning for logits only.
        max_logit_change: the largest |ŷ − y| of any output.
        relative_error: ‖ŷ − y‖² / ‖y − ȳ‖² of the outputs, a share of squares.
        metrics: "accuracy", or "perplexity" of causal language models; empty without labels.
        relative_errors: the relative error of each output that counts, if there are several; all other fields are about
            the first output.
        embedding: {"cosine", "least_cosine", "same_neighbour": number} for embeddings, one vector per sample
            (`hf_lgelu.comparing.output_comparison.OutputComparison`); else empty.
        detection: a detector's distance in scores and boxes (`hf_lgelu.comparing.net_comparison.NetComparison`).
    """

    kl: float | None
    agreement: float
    max_logit_change: float
    relative_error: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    relative_errors: Mapping[str, float] = field(default_factory=dict)
    embedding: Mapping[str, float] = field(default_factory=dict)
    detection: float | None = None

    @property
    def distance(self) -> float:
        """KL to the original in nats; without class scores the relative error; a detector's `detection`.

        It is infinite where outputs are not finite, so that every finite network is nearer.
        """
        found = self.relative_error if self.kl is None else self.kl
        found = found if self.detection is None else self.detection
        return math.inf if math.isnan(found) else found

    @property
    def in_words(self) -> str:
        """ "KL 0.0025 nat", the relative error where outputs are no class scores, or "infinitely far"."""
        if not math.isfinite(self.distance):
            return "infinitely far"
        shown = significant(self.distance)
        if self.detection is not None:
            return f"{DETECTION} {shown}"
        return f"relative error {shown} (share of squares)" if self.kl is None else f"KL {shown} nat"

    @property
    def measures(self) -> dict[str, str]:
        """{measure: value} of the measures that fit the outputs, as tables and sentences show them."""
        change = {"largest change" if self.kl is None else "largest logit change": significant(self.max_logit_change)}
        error = {RELATIVE_ERROR: significant(self.relative_error)}
        return self.main_measures | ({} if self.embedding else change) | error

    @property
    def main_measures(self) -> dict[str, str]:
        """{measure: value} of the measures that decide."""
        found = main_measures(self.kl, self.agreement, self.relative_error, self.embedding)
        return found if self.detection is None else {DETECTION: significant(self.detection)} | found


def networks_table(
    scores: Mapping[str, float], networks: Mapping[str, NetChange], *, main: bool = False
) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of the original, whose `scores` are given, and other networks on the same inputs.

    All measures are shown, or the `main` ones.
    """
    *_, last = networks.values()
    same = dict.fromkeys(last.embedding, 1.0)
    kl, detection = (None if distance is None else 0.0 for distance in (last.kl, last.detection))
    original = NetChange(kl, 1.0, 0.0, 0.0, scores, embedding=same, detection=detection)
    titles, rows = list(last.main_measures if main else last.measures), []
    for name, change in {"original": original, **networks}.items():
        measured = [change.measures.get(measure, NONE) for measure in titles]
        rows.append([name, *measured, *(score(metric, change.metrics.get(metric)) for metric in scores)])
    return ["network", *titles, *scores], rows
