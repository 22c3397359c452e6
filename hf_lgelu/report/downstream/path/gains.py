"""The four cards on what ReLU enables: {name of a benchmark: bars}, from the measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_lgelu.downstream.records import MeasurementRecord
from hf_lgelu.report.downstream.figures.verification import OUTCOMES, outcome_counts
from hf_lgelu.report.downstream.measurements import of_measurement, rows_by
from hf_lgelu.report.downstream.path.bars import Bar
from hf_lgelu.report.downstream.path.layout import INK
from hf_lgelu.report.numbers import MISSING

Groups = Mapping[str, Sequence[Bar]]


@dataclass(frozen=True)
class Gain:
    """One card.

    Args:
        title: of the card.
        says: a sentence of two lines at most.
        groups: {name of a benchmark: its bars}.
        text_width: inches that the texts behind the bars need.
        legend: {text: colour}, below the bars.
    """

    title: str
    says: str
    groups: Groups
    text_width: float
    legend: Mapping[str, str]


def proofs(measurements: Sequence[MeasurementRecord], names: Mapping[str, str]) -> Gain:
    """Images proved, refuted and left open per ε, of the hardened network with ReLU."""
    found = of_measurement(measurements, "verification")
    groups: dict[str, list[Bar]] = {}
    refused = False
    for benchmark, name in names.items():
        bars = groups.setdefault(name, [])
        for (model, epsilon), seeds in rows_by(found.get(benchmark, ()), "model", "epsilon").items():
            refused |= model == "gelu" and seeds[0]["refusal"] is not None
            if model == "hardened_relu" and seeds[0]["refusal"] is None:
                counts = outcome_counts(seeds)
                pieces = tuple((counts[outcome], colour) for outcome, (colour, _) in OUTCOMES.items())
                bars.append(Bar(pieces, f"ε = {epsilon:g}", INK))
    says = "images safe within ±ε, by\nMarabou; GELU: " + ("it refuses" if refused else MISSING)
    return Gain("Proofs", says, groups, 0.75, {outcome: colour for outcome, (colour, _) in OUTCOMES.items()})
