"""What each measurement came to, in a table for the README."""

import statistics
from collections.abc import Callable, Mapping, Sequence

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.measurements import (
    MEASURED_ON,
    Row,
    label_of,
    measured_benchmarks,
    of_measurement,
    rows_by,
    seeds_there,
    values_of,
)
from lgelu_lab.report.downstream.tables.columns import amount
from lgelu_lab.report.downstream.tables.int8 import INT8
from lgelu_lab.report.markup import Cell, Table
from lgelu_lab.report.numbers import MISSING, NONE, digits_of, largest, listed, number

STEP = 0.01
"""Length of the step at which linear models are compared, L2, in standardized features."""

_MODELS = ("gelu", "relu", "hardened_relu")
_TRANSFORMERS = ("deit-tiny-imagenet", "gpt2-wikitext2")

Records = Sequence[MeasurementRecord]
Line = Callable[[Records], tuple[str, Mapping[str, str]]]
"""The records of one benchmark → (what was measured, {network: text})."""


def overview_table(measurements: Records) -> Table:
    """A row per benchmark and measurement, a column per network; zeros and certificates are in the report alone."""
    rows = [
        _row(name, line, benchmark, measurements)
        for benchmark in measured_benchmarks(measurements)
        for name, line in _LINES.items()
        if benchmark in MEASURED_ON[name]
    ]
    return Table(
        key="downstream",
        title="What the ReLU networks allow",
        caption="Means over seeds, of errors the largest; the report has the deviations, the settings, the machines "
        "and every other row. int8 by onnxruntime, with the median time of a batch on one thread; proofs by Marabou, "
        "which has no GELU (other verifiers can bound it).",
        header=("Benchmark", "Measured", *map(label_of, _MODELS), "Seeds"),
        rows=tuple(rows),
        in_groups=True,
        text_columns=5,
        wide_columns=(1, 2, 3, 4),
    )


def _row(name: str, line: Line, benchmark: str, measurements: Records) -> tuple[Cell | str, ...]:
    records = of_measurement(measurements, name).get(benchmark)
    if not records:
        absent = Cell(MISSING, "missing")
        return (benchmark, Cell(_TITLES[name], "missing"), absent, *(Cell(NONE, "missing"),) * len(_MODELS))
    title, texts = line(records)
    return (benchmark, title, *(texts.get(model, NONE) for model in _MODELS), seeds_there(records))


def _int8(records: Records) -> tuple[str, Mapping[str, str]]:
    timed = rows_by(records, "model", "precision", "batch_size")
    size = max(size for _, _, size in timed)
    # What between a transformer's products is rounded as well costs GPT-2 a tenth of its perplexity.
    transformer = records[0].benchmark in _TRANSFORMERS
    small, what = ("int8-layers", "int8 products") if transformer else (INT8, "int8")
    texts = {}
    for model in _MODELS:
        pair = [timed.get((model, precision, size)) for precision in ("float32", small)]
        if all(pair):
            digits = digits_of(pair[0][0]["metric"])
            scores = " → ".join(number(_mean(rows, "score"), digits) for rows in pair)
            times = " → ".join(f"{_mean(rows, 'median_ms'):.3g}" for rows in pair)
            texts[model] = f"{scores}; {times} ms"
    return f"float32 → {what}: score; batch of {size}", texts


def _verification(records: Records) -> tuple[str, Mapping[str, str]]:
    asked = rows_by(records, "model", "epsilon")
    epsilons = sorted({epsilon for _, epsilon in asked if epsilon is not None})
    points = max(row["points"] for rows in asked.values() for row in rows if row["points"] is not None)
    texts = {}
    for model in _MODELS:
        found = [asked[model, epsilon] for epsilon in (None, *epsilons) if (model, epsilon) in asked]
        if any(rows[0]["refusal"] is not None for rows in found):
            texts[model] = "refused"
        elif found:
            texts[model] = listed([amount(_mean(rows, "proved")) for rows in found])
    return f"images proved of {points}, ε = {listed([f'{epsilon:g}' for epsilon in epsilons])}", texts


def _pruning(records: Records) -> tuple[str, Mapping[str, str]]:
    rows = rows_by(records, "model", "criterion", "rule", "fraction")
    fractions = sorted({fraction for _, _, _, fraction in rows if fraction is not None})
    half = min(fractions, key=lambda fraction: abs(fraction - 0.5))
    texts = {}
    for model in _MODELS:
        pair = [rows.get((model, criterion, "fraction", half)) for criterion in ("apoz", "magnitude")]
        if all(pair):
            digits = digits_of(pair[0][0]["metric"])
            texts[model] = ", ".join(number(_mean(found, "score_finetuned"), digits) for found in pair)
    return f"score without {half * 100:.0f} % of the units, fine-tuned: by APoZ, by magnitude", texts


def _linear_pieces(records: Records) -> tuple[str, Mapping[str, str]]:
    rows = rows_by(records, "model", "perturbation")
    texts = {}
    for model in _MODELS:
        found = [row for row in rows.get((model, STEP), ()) if row["max_error_float64"] is not None]
        if found:
            texts[model] = largest(values_of(found, "max_error_float64")).replace("e-", "e−")
            inside = [row["inside"] for row in found if row["inside"] is not None]
            texts[model] += f" ({100 * statistics.fmean(inside):.0f} % inside)" if inside else ""
    return f"error of W·x + b, {STEP:g} away in the piece", texts


def _mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(values_of(rows, key))


_LINES: dict[str, Line] = {
    "int8": _int8,
    "verification": _verification,
    "pruning": _pruning,
    "linear_pieces": _linear_pieces,
}

_TITLES = {
    "int8": "float32 → int8",
    "verification": "images proved",
    "pruning": "score pruned",
    "linear_pieces": "error of the linear model",
}
