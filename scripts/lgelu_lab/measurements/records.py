"""One measurement → one JSON record. No torch here, and nothing that loads it: the report reads records.

Schema, version 1 (`SCHEMA_VERSION`); every key is present:

- schema_version, measurement (a key of MEASUREMENTS), benchmark, seed, created (UTC, ISO 8601), seconds
- settings: what was asked for (sample counts, tolerances, repeats, ...); bf16, where one takes it: whether
  networks were judged, and trained or stepped, under bfloat16 autocast (absent earlier: float32)
- models: {model: {run, metric, score, relu_score, target_hardness}} of the networks measured, from the record of the
  run that trained each: the last epoch's score on the evaluation split
- rows: a list of flat objects with the same keys in each, null where one does not apply; "model" says
  which network. Every measurement describes its columns where it is defined
- versions: {package: version}; hardware as in a run's record
- data: what was read, as in a run's record, where a network was not trained here; {} elsewhere (the run's record says
  it), and in earlier records
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lgelu_lab.studies.folder import write_whole
from lgelu_lab.studies.records import SCHEMA_VERSION, read_fields


@dataclass(frozen=True)
class MeasurementRecord:
    """One measurement on one benchmark's networks; the keys are described at the top of this file."""

    measurement: str
    benchmark: str
    seed: int
    created: str
    seconds: float
    settings: dict[str, Any]
    models: dict[str, dict[str, Any]]
    rows: tuple[dict[str, Any], ...]
    versions: dict[str, str]
    hardware: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def measurement_path(folder: str | os.PathLike, benchmark: str, measurement: str, seed: int) -> Path:
    """Where a measurement's record lies: `folder`/<benchmark>/<measurement>-seed<seed>.json."""
    return Path(folder) / benchmark / f"{measurement}-seed{seed}.json"


def write_measurement(record: MeasurementRecord, folder: str | os.PathLike) -> Path:
    """Write the record below `folder`. It is complete or not there: written beside, then renamed.

    Raises ValueError if the rows do not have the same keys, or hold NaN or infinity.
    """
    keys = {tuple(sorted(row)) for row in record.rows}
    if len(keys) != 1:
        raise ValueError(f"the rows of {record.measurement} must all have the same keys, got {sorted(keys)}")
    text = json.dumps(asdict(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return write_whole(measurement_path(folder, record.benchmark, record.measurement, record.seed), text)


def read_measurement(path: str | os.PathLike) -> MeasurementRecord:
    """Read one record.

    Raises FileNotFoundError, or ValueError that names the file where it is no measurement's record.
    """
    path = Path(path)
    raw = read_fields(path, MeasurementRecord, "measurement's record")
    rows = raw.pop("rows")
    return MeasurementRecord(rows=tuple(rows), **raw)


def plain_settings(settings: Any) -> dict[str, Any]:
    """A dataclass of settings as a record has it: JSON has lists where the settings have tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}


def read_same(
    path: str | os.PathLike, settings: Any, unnamed: Mapping[str, Any] | None = None, left: Collection[str] = ()
) -> MeasurementRecord:
    """The record at `path`, which must have been measured with these settings.

    Args:
        path: of the record.
        settings: a dataclass, as the measurement takes it.
        unnamed: what a setting was in records that do not name it yet.
        left: settings that may be what they were.

    Raises ValueError that names the settings that differ, and as `read_measurement`.
    """
    record = read_measurement(path)
    had = {**(unnamed or {}), **record.settings}
    asked = {name: value for name, value in plain_settings(settings).items() if name not in left}
    differing = [name for name, value in asked.items() if had.get(name) != value]
    if differing:
        told = ", ".join(f"{name}={had.get(name)!r}" for name in differing)
        raise ValueError(f"{path} was measured with {told}; remove it, or give another output folder")
    return record


def read_measurements(folder: str | os.PathLike) -> list[MeasurementRecord]:
    """Every measurement below a folder, in the order of their paths; an empty list if there is none."""
    found = sorted(path for path in Path(folder).rglob("*-seed*.json") if not path.name.startswith("."))
    return [read_measurement(path) for path in found]
