"""One downstream measurement → one JSON record. No torch here: the report reads it.

Schema, version 1 (`SCHEMA_VERSION`); every key is present:

- schema_version, measurement (a key of MEASUREMENTS), benchmark, seed, created (UTC, ISO 8601), seconds
- settings: what was asked for (sample counts, tolerances, repeats, ...)
- models: {model: {run, metric, score, relu_score, target_hardness}} of the networks measured, from the record of the
  run that trained each: the last epoch's score on the evaluation split
- rows: a list of flat objects with the same keys in each, null where one does not apply; "model" says
  which network. Every measurement describes its columns where it is defined
- versions: {package: version}; hardware as in a run's record
"""

import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


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
    target = measurement_path(folder, record.benchmark, record.measurement, record.seed)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".measurement-", suffix=".json")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide it from the people it is shared with
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return target


def read_measurement(path: str | os.PathLike) -> MeasurementRecord:
    """Read one record. Raises FileNotFoundError, or ValueError for a file that is no measurement's record."""
    path = Path(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not the record of a measurement: {error}") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    names = {entry.name for entry in fields(MeasurementRecord)}
    if version != SCHEMA_VERSION or raw.keys() != names:
        raise ValueError(
            f"{path} is not a measurement's record of schema {SCHEMA_VERSION}: schema {version!r}, missing "
            f"{sorted(names - set(raw))}, unknown {sorted(set(raw) - names)}"
        )
    return MeasurementRecord(rows=tuple(raw.pop("rows")), **raw)


def read_measurements(folder: str | os.PathLike) -> list[MeasurementRecord]:
    """Every measurement below a folder, in the order of their paths; an empty list if there is none."""
    return [read_measurement(path) for path in sorted(Path(folder).rglob("*-seed*.json"))]
