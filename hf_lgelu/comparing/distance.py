"""The distance of a network from another one, as numbers in a record."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_lgelu.formats import DETECTION, NONE, RELATIVE_ERROR, percent, score, significant
from hf_lgelu.networks.outputs import BOXES


@dataclass(frozen=True)
class Distance:
    """The distance of a network from the original on the same inputs, in the output that is farthest.

    Each output has the measure of its kind: class scores the KL, a detector's scores and boxes `detection`, embeddings
    and other values the relative error.

    Args:
        output: name of the farthest output; "" for a bare tensor.
        rows: of this output: predictions, or rows of values.
        kl: mean KL(original ‖ network) in nats per prediction; None where the output holds no class scores.
        agreement: share of predictions, 0 to 1, with the original's argmax; None where there is no KL.
        largest_change: the largest |ŷ − y|.
        largest_output: the largest finite |y| of the original.
        relative_error: ‖ŷ − y‖² / ‖y − ȳ‖², a share of squares.
        embedding: {"cosine", "least_cosine", "same_neighbour": number} for embeddings, one vector per sample
            (`OutputComparison.embedding`); else empty.
        detection: a detector's distance in scores and boxes (`hf_lgelu.comparing.comparison.PlacesComparison`).
        metrics: "accuracy", or "perplexity" of causal language models; empty without labels.
        outputs: {output: its distance} where several outputs count.
    """

    output: str
    rows: int
    kl: float | None
    agreement: float | None
    largest_change: float
    largest_output: float
    relative_error: float
    embedding: Mapping[str, float] = field(default_factory=dict)
    detection: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    outputs: Mapping[str, "Distance"] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The number that decides; infinite where outputs are not finite, so that every finite network is nearer."""
        value = self.relative_error if self.kl is None else self.kl
        value = value if self.detection is None else self.detection
        return math.inf if math.isnan(value) else value

    @property
    def by_output(self) -> list[float]:
        """The distances of all outputs that decide, the farthest first."""
        every = deciding(self.outputs or {self.output: self})
        return sorted((distance.value for distance in every), reverse=True)

    @property
    def in_words(self) -> str:
        """ "KL 0.0025 nat", "relative error 0.01 (share of squares) in `values`", or "infinitely far"."""
        if not math.isfinite(self.value):
            return "infinitely far"
        shown = significant(self.value)
        words = f"relative error {shown} (share of squares)" if self.kl is None else f"KL {shown} nat"
        words = words if self.detection is None else f"{DETECTION} {shown}"
        return f"{words} in `{self.output}`" if self.outputs else words

    @property
    def measures(self) -> dict[str, str]:
        """{measure: value} of the measures that fit the outputs, as tables and sentences show them."""
        if self.outputs:
            return self.main_measures
        change = {"largest change" if self.kl is None else "largest logit change": significant(self.largest_change)}
        error = {RELATIVE_ERROR: significant(self.relative_error)}
        return self.main_measures | ({} if self.embedding else change) | error

    @property
    def main_measures(self) -> dict[str, str]:
        """{measure: value} of the main measures; of several outputs, those of each by its name."""
        if self.outputs:
            every = {name: distance.main_measures for name, distance in self.outputs.items()}
            return {
                f"{name}: {title}": value for name, of_output in every.items() for title, value in of_output.items()
            }
        if self.embedding:
            titles = {"cosine": "cosine to the original", "least_cosine": "least cosine"}
            cosines = {
                title: score(name, self.embedding[name]) for name, title in titles.items() if name in self.embedding
            }
            kept = self.embedding.get("same_neighbour")
            return cosines if kept is None else cosines | {"same nearest neighbour among these": percent(kept)}
        if self.kl is None or self.agreement is None:
            shown = {RELATIVE_ERROR: significant(self.relative_error)}
        else:
            shown = {"KL to the original (nats)": significant(self.kl), "same prediction": percent(self.agreement)}
        return shown if self.detection is None else {DETECTION: significant(self.detection)} | shown

    def __str__(self) -> str:
        text = f"largest change {self.largest_change:.3g} of outputs up to {self.largest_output:.3g}"
        text = f"`{self.output}`: {text}" if self.outputs else text
        if self.embedding:
            return ", ".join([text, *(f"{name} {value}" for name, value in self.main_measures.items())])
        if self.agreement is None:
            return f"{text}, on {self.rows} rows"
        return f"{text}, {percent(self.agreement)} of {self.rows} predictions unchanged"


def deciding(outputs: Mapping[str, Distance]) -> list[Distance]:
    """The distances that decide, of all `outputs`: a detector's boxes are in the `detection` of its scores."""
    is_detector = any(distance.detection is not None for distance in outputs.values())
    return [distance for name, distance in outputs.items() if not (is_detector and name == BOXES)]


def networks_table(
    scores: Mapping[str, float], networks: Mapping[str, Distance], *, main: bool = False
) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of the original, whose `scores` are given, and other networks on the same inputs.

    All measures are shown, or the `main_measures`.
    """
    last = list(networks.values())[-1]
    titles, rows = list(last.main_measures if main else last.measures), []
    for name, distance in {"original": _of_itself(last), **networks}.items():
        metrics = scores if name == "original" else distance.metrics
        measures = [distance.measures.get(title, NONE) for title in titles]
        rows.append([name, *measures, *(score(metric, metrics.get(metric)) for metric in scores)])
    return ["network", *titles, *scores], rows


def _of_itself(other: Distance) -> Distance:
    """The distance 0 of a network from itself, in the measures of the distance of another network from it."""
    kl, detection = (None if distance is None else 0.0 for distance in (other.kl, other.detection))
    agreement = None if other.agreement is None else 1.0
    outputs = {name: _of_itself(distance) for name, distance in other.outputs.items()}
    same = dict.fromkeys(other.embedding, 1.0)
    largest = other.largest_output
    return Distance(other.output, other.rows, kl, agreement, 0.0, largest, 0.0, same, detection, outputs=outputs)
