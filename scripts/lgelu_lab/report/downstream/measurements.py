"""Measurement records → what the tables and figures show: by benchmark, the same row of every seed side by side."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.numbers import NONE
from lgelu_lab.studies.experiments import SEEDS, STUDIES

Row = Mapping[str, Any]
"""One row of a measurement's record."""

MODEL_LABELS = {
    "gelu": "GELU",
    "relu": "ReLU from the start",
    "lambda_gelu": "λ-GELU as learned",
    "hardened": "λ-GELU hardened",
    "hardened_relu": "hardened, swapped",
}
"""What the tables call the networks of `downstream.models.MODELS`."""

BENCHMARKS = STUDIES["downstream"].benchmarks

_DENSE = ("mlp-digits", "mlp-fmnist")
_ALL_BUT_CIFAR100 = tuple(name for name in BENCHMARKS if name != "resnet18-cifar100")

MEASURED_ON: dict[str, tuple[str, ...]] = {
    "int8": _ALL_BUT_CIFAR100,
    "verification": _DENSE,
    "zeros": BENCHMARKS,
    "pruning": _DENSE,
    "linear_pieces": _DENSE,
    "certificate": _DENSE,
    "conversion": _ALL_BUT_CIFAR100,
    "conversion-finetuning": ("mlp-digits", "mlp-adult", "mlp-fmnist", "gpt2-wikitext2"),
}
"""{measurement: what it can be made on}: those of `downstream.table.MEASUREMENTS`, which needs torch."""


def of_measurement(measurements: Iterable[MeasurementRecord], name: str) -> dict[str, list[MeasurementRecord]]:
    """{benchmark: its seeds in order} of one measurement.

    Raises ValueError where a seed is there twice.
    """
    found: dict[str, list[MeasurementRecord]] = {}
    for record in sorted(measurements, key=lambda record: (_place(record.benchmark), record.seed)):
        if record.measurement == name:
            found.setdefault(record.benchmark, []).append(record)
    for benchmark, records in found.items():
        seeds = [record.seed for record in records]
        if len(set(seeds)) < len(seeds):
            raise ValueError(
                f"{name} of {benchmark}: more than one record of a seed ({', '.join(map(str, seeds))}). Their mean "
                "would count it twice; report on a folder that holds each measurement once"
            )
    return found


def measured_benchmarks(measurements: Iterable[MeasurementRecord]) -> list[str]:
    """Every benchmark that something was measured on, the study's first and in its order."""
    return sorted({record.benchmark for record in measurements}, key=_place)


def rows_by(records: Sequence[MeasurementRecord], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """{values of `keys`: that row of each seed that has it}, in the order of the first seed that has one.

    A row has the metric of its network's score as well.
    Raises ValueError where a record has two rows with the same values, or a row does not have a key.
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for record in records:
        seen = set()
        for row in record.rows:
            absent = [key for key in keys if key not in row]
            if absent:
                raise ValueError(
                    f"a row of {record.measurement} of {record.benchmark} has no {', '.join(absent)}; it has "
                    f"{', '.join(row)}"
                )
            values = tuple(row[key] for key in keys)
            if values in seen:
                raise ValueError(
                    f"{record.measurement} of {record.benchmark}, seed {record.seed}: two rows with "
                    + ", ".join(f"{key} = {value!r}" for key, value in zip(keys, values, strict=True))
                )
            seen.add(values)
            metric = record.models.get(row.get("model"), {}).get("metric")
            found.setdefault(values, []).append({"metric": metric, **row})
    return found


def values_of(rows: Iterable[Row], key: str) -> list[Any]:
    """One column of some rows."""
    return [row[key] for row in rows]


def label_of(model: str) -> str:
    """A network's name in the tables; its own where there is no other."""
    return MODEL_LABELS.get(model, model)


def seeds_there(rows: Sequence[Any]) -> str:
    """How many of the paper's seeds are there: "3", or "2 of 3"."""
    return str(len(rows)) if len(rows) >= len(SEEDS) else f"{len(rows)} of {len(SEEDS)}"


def over_seeds(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    """ "mean ± sample standard deviation", each written by `show`; a dash where none applies.

    Where some seeds have a value and others have none, it says of how many seeds the mean is.
    """
    there = [value for value in values if value is not None]
    if not there:
        return NONE
    text = show(statistics.fmean(there))
    text += f" ± {show(statistics.stdev(there))}" if len(there) > 1 else ""
    return text if len(there) == len(values) else f"{text} ({len(there)} of {len(values)} seeds)"


def _place(benchmark: str) -> tuple[int, str]:
    return (BENCHMARKS.index(benchmark) if benchmark in BENCHMARKS else len(BENCHMARKS)), benchmark
