"""What the measurements rest on: settings, sample counts, time, machine, versions."""

from collections.abc import Sequence
from typing import Any

from lgelu_lab.measurements.records import MeasurementRecord
from lgelu_lab.report.downstream.measurements import of_measurement
from lgelu_lab.report.markup import Table
from lgelu_lab.report.numbers import either, listed

_NOT_TOLD = ("python", "datasets", "evaluate", "tokenizers", "accelerate")  # no number rests on them


def measured_with_table(measurements: Sequence[MeasurementRecord]) -> Table:
    """A row per measurement and benchmark."""
    names = dict.fromkeys(record.measurement for record in measurements)
    rows = [
        _row(name, benchmark, records)
        for name in names
        for benchmark, records in of_measurement(measurements, name).items()
    ]
    packages = [name for name in dict.fromkeys(n for r in measurements for n in r.versions) if name not in _NOT_TOLD]
    versions = [f"{name} {either([r.versions[name] for r in measurements if name in r.versions])}" for name in packages]
    return Table(
        key="measured-with",
        title="Settings, seconds and machines of the measurements",
        caption="Written by scripts/downstream.py; every setting has its default there.",
        header=("Measurement", "Benchmark", "Seeds", "Settings", "Seconds", "Machine"),
        rows=tuple(rows),
        notes=(f"Versions: {', '.join(versions)}.",) if versions else (),
        in_groups=True,
        text_columns=6,
        wide_columns=(3,),
    )


def machine_of(record: MeasurementRecord) -> str:
    """ "AMD EPYC, 1 thread"."""
    threads = record.hardware["threads_per_process"]
    return f"{record.hardware['cpu']}, {threads} thread{'s' * (threads > 1)}"


def _row(name: str, benchmark: str, records: Sequence[MeasurementRecord]) -> tuple[str, ...]:
    return (
        name,
        benchmark,
        listed([record.seed for record in records]),
        either([_settings(record.settings) for record in records]),
        listed([f"{record.seconds:.1f}" for record in records]),
        either([machine_of(record) for record in records]),
    )


def _settings(settings: dict[str, Any]) -> str:
    return "; ".join(f"{name.replace('_', ' ')} {_setting(value)}" for name, value in settings.items())


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return listed([_setting(entry) for entry in value]) or "of the benchmark"
    return f"{value:g}" if isinstance(value, float) else str(value)
