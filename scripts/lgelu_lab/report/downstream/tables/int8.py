"""Score, latency and what stays in float of every network by onnxruntime, in float32 and int8."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.tables.columns import (
    constant,
    fixed,
    header_of,
    measured,
    percentage,
    quantity,
    rows_of,
    score,
    worst,
)
from lgelu_lab.report.markup import Table
from lgelu_lab.report.numbers import count

INT8 = "int8-all"
PRECISIONS = {"float32": "float32", "int8-layers": "int8, layers alone", INT8: "int8"}
"""What the tables call the precisions of `downstream.int8`."""

_OF_A_BATCH_SIZE = ("batch_size", "min_ms", "quartile1_ms", "median_ms", "quartile3_ms", "calls_per_round")


def int8_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per network and precision; a column of latency per batch size."""
    records = [record for record in measurements if record.measurement == "int8"]
    sizes = batch_sizes(records)
    widened = [_widened(record, sizes) for record in records]
    others = [record for record in measurements if record.measurement != "int8"]
    columns = (
        constant("Precision", "precision", lambda name: PRECISIONS.get(name, name)),
        score("Score", "score"),
        *(measured(f"Median ms, batch {size}", f"median_ms, {size}") for size in sizes),
        constant("Activations", "activations"),
        constant("of these in float", "float_activations"),
        constant("Integer layers", "integer_layers"),
        constant("To integers", "quantize_nodes"),
        constant("Back to float", "dequantize_nodes"),
        quantity("Same predictions, %", "same_argmax", percentage),
        worst("Largest logit difference", "max_logit_difference"),
        constant("Rows evaluated", "evaluated_rows", count),
        constant("File, MB", "megabytes", fixed(2)),
    )
    return Table(
        key="int8",
        title="float32 and int8 by onnxruntime",
        caption="Static int8: weights per channel, activations unsigned, ranges from calibration rows of the training "
        "split; of every operation that can be, or of convolutions and matrix products alone. Score in onnxruntime on "
        "the rows evaluated; predictions and logits against torch in float32. Latency of one call on one thread, every "
        "file timed in turn in each round; the median over the rounds. Activations in float stand between a step back "
        "to float and one to integers; a ReLU is the lower end of the integers' range and vanishes. Mean ± sample "
        "standard deviation over seeds.",
        header=header_of(columns),
        rows=rows_of([*widened, *others], "int8", ("model", "precision"), columns),
        in_groups=True,
        text_columns=3,
    )


def batch_sizes(records: Sequence[MeasurementRecord]) -> list[int]:
    """Every batch size that was timed, in order."""
    return sorted({row["batch_size"] for record in records for row in record.rows})


def _widened(record: MeasurementRecord, sizes: Sequence[int]) -> MeasurementRecord:
    """The record with one row per network and precision, which has the latency of every batch size."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in record.rows:
        facts = {key: value for key, value in row.items() if key not in _OF_A_BATCH_SIZE}
        facts |= {f"median_ms, {size}": None for size in sizes}
        wide = rows.setdefault((row["model"], row["precision"]), facts)
        wide["megabytes"] = row["file_bytes"] / 1e6
        wide[f"median_ms, {row['batch_size']}"] = row["median_ms"]
    return dataclasses.replace(record, rows=tuple(rows.values()))
