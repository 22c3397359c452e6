"""The four cards on what ReLU enables: {name of a benchmark: bars}, from the measurements."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.figures.verification import OUTCOMES, outcome_counts
from lgelu_lab.report.downstream.measurements import Row, of_measurement, rows_by, values_of
from lgelu_lab.report.downstream.path.bars import Bar
from lgelu_lab.report.downstream.path.layout import HARD, INK, SMOOTH
from lgelu_lab.report.downstream.tables.columns import amount
from lgelu_lab.report.downstream.tables.int8 import INT8
from lgelu_lab.report.downstream.tables.overview import STEP
from lgelu_lab.report.numbers import MISSING, listed

_COMPARED = {"gelu": SMOOTH, "hardened_relu": HARD}
_LEGEND = {"GELU": SMOOTH, "hardened, ReLU": HARD}
_LEAST = -16.0  # log10 of the error at which a bar begins: the spacing of float64

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


def integers(measurements: Sequence[MeasurementRecord], names: Mapping[str, str]) -> Gain:
    """Latency in int8 against float32 at the largest batch, and accuracy in int8: GELU, and hardened with ReLU."""
    found = of_measurement(measurements, "int8")
    groups: dict[str, list[Bar]] = {name: [] for name in names.values()}
    sizes = set()
    for benchmark, name in names.items():
        records = found.get(benchmark, ())
        timed = rows_by(records, "model", "precision", "batch_size")
        size = max((size for _, _, size in timed), default=None)
        for model, colour in _COMPARED.items():
            pair = [timed.get((model, precision, size)) for precision in (INT8, "float32")]
            if all(pair):
                sizes.add(size)
                small, wide = (statistics.fmean(values_of(rows, "median_ms")) for rows in pair)
                # A share of the float32 time of the same network: the benchmarks differ in size.
                accuracy = 100 * statistics.fmean(values_of(pair[0], "score"))
                text = f"{_milliseconds(small)} ms, {accuracy:.1f} %"
                groups[name].append(Bar(((small / wide, colour),), text, colour, 1.0))
    batch = f", batch {listed(sorted(sizes))}" if sizes else ""
    says = f"onnxruntime{batch}: share\nof the float32 time; accuracy"
    return Gain("int8 inference", says, groups, 1.2, _LEGEND)


def proofs(measurements: Sequence[MeasurementRecord], names: Mapping[str, str]) -> Gain:
    """Images proved, refuted and left open per ε, of the hardened network with ReLU."""
    found = of_measurement(measurements, "verification")
    groups: dict[str, list[Bar]] = {name: [] for name in names.values()}
    refused = False
    for benchmark, name in names.items():
        for (model, epsilon), seeds in rows_by(found.get(benchmark, ()), "model", "epsilon").items():
            refused |= model == "gelu" and seeds[0]["refusal"] is not None
            if model == "hardened_relu" and seeds[0]["refusal"] is None:
                counts = outcome_counts(seeds)
                pieces = tuple((counts[outcome], colour) for outcome, (colour, _) in OUTCOMES.items())
                groups[name].append(Bar(pieces, f"ε = {epsilon:g}", INK))
    gelu = "it refuses" if refused else MISSING
    legend = {outcome.removeprefix("left "): colour for outcome, (colour, _) in OUTCOMES.items()}
    return Gain("Proofs", f"images safe within ±ε, by\nMarabou; GELU: {gelu}", groups, 0.75, legend)


def pruning(measurements: Sequence[MeasurementRecord], names: Mapping[str, str]) -> Gain:
    """Units of all layers that are zero on every training row, and what their removal changes there."""
    found = of_measurement(measurements, "pruning")
    groups: dict[str, list[Bar]] = {name: [] for name in names.values()}
    changes: list[float] = []
    for benchmark, name in names.items():
        rows = rows_by(found.get(benchmark, ()), "model", "criterion", "rule", "fraction")
        for model, colour in _COMPARED.items():
            whole, dead = (rows.get((model, criterion, None, None)) for criterion in ("none", "dead"))
            if whole and dead:
                units = statistics.fmean(_units(row) for row in whole)
                gone = units - statistics.fmean(_units(row, refused=units) for row in dead)
                groups[name].append(Bar(((gone, colour),), f"{amount(gone)} of {amount(units)}", colour))
                changes += [row["calibration_max_logit_change"] for row in dead if row["refusal"] is None]
    change = _power(max(changes)) if changes else f"({MISSING})"
    says = f"zero on all training rows; with-\nout them logits move by {change}"
    return Gain("Dead units", says, groups, 1.05, _LEGEND)


def _units(row: Row, refused: float = 0) -> float:
    return refused if row["refusal"] is not None else sum(map(int, row["widths"].split("-")))


def pieces(measurements: Sequence[MeasurementRecord], names: Mapping[str, str]) -> Gain:
    """Largest error of the linear model a small step away from the input, on a logarithmic scale."""
    found = of_measurement(measurements, "linear_pieces")
    groups: dict[str, list[Bar]] = {name: [] for name in names.values()}
    for benchmark, name in names.items():
        rows = rows_by(found.get(benchmark, ()), "model", "perturbation")
        for model, colour in _COMPARED.items():
            errors = [value for value in values_of(rows.get((model, STEP), ()), "max_error_float64") if value]
            if errors:
                length = max(0.0, math.log10(max(errors)) - _LEAST)
                groups[name].append(Bar(((length, colour),), _power(max(errors)), colour))
    says = f"error of W·x + b, {STEP:g} away\nin the piece; log scale"
    return Gain("Exact linear pieces", says, groups, 0.6, _LEGEND)


Card = Callable[[Sequence[MeasurementRecord], Mapping[str, str]], Gain]

GAINS: tuple[Card, ...] = (
    integers,
    proofs,
    pruning,
    pieces,
)
"""The cards, from left to right."""


def _power(value: float) -> str:
    """ "8e−6"."""
    digits, exponent = f"{value:.0e}".split("e")
    return f"{digits}e{int(exponent)}".replace("-", "−")


def _milliseconds(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"
