"""Measured rows in a CSV file, each with what it was measured on; a rerun finds what is there."""

import csv
import importlib.metadata
import io
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from hf_lgelu.environment import hardware, package_versions

UNKNOWN = "unknown"
_MEASURED_SOURCE = "hf_lgelu/activation"


@dataclass(frozen=True)
class Provenance:
    """On what, and with which software, a row was measured.

    `commit` is the last one that changed the activation's source, with "-dirty" where the source differs from it.
    """

    device: str
    torch: str
    triton: str
    transformers: str
    hf_lgelu: str
    commit: str


@dataclass(frozen=True)
class Row:
    """One provider in one mode on one input, or one model's training step (mode "step", its name as size).

    Attributes:
        provider: a key of PROVIDERS, or of ACTIVATIONS for a step.
        kernel: what computed it: a row of KERNELS, "torch" or "inductor".
        elements: of the input; of a step, the model's parameters.
        hardness: λ, empty where there is none.
        allocator: "keep" or "stock" (see the script's help), "torch" on a GPU.
        clock: a key of CLOCKS.
        milliseconds_q20 to milliseconds_q80: quantiles over the rounds of the time of one call.
        ratio_q20 to ratio_q80: quantiles over the rounds of that time over the reference's in the same round.
        repetitions: calls in one timed stretch.
        gigabytes_per_second: the bytes that a fused kernel has to move (two tensors forward, three backward) over
            the median time; empty for a step.
        saved_bytes_per_element: kept for the backward pass; empty in mode "backward" and for a step.
        peak_bytes: the most held within a call, in modes "both" and "step"; of a step with weights and optimizer.
        peak_ratio: over the reference's.
    """

    provider: str
    kernel: str
    mode: str
    size: str
    memory_format: str
    elements: str
    dtype: str
    hardness: str
    threads: str
    allocator: str
    clock: str
    milliseconds_q20: str = ""
    milliseconds_median: str = ""
    milliseconds_q80: str = ""
    ratio_q20: str = ""
    ratio_median: str = ""
    ratio_q80: str = ""
    rounds: str = ""
    repetitions: str = ""
    gigabytes_per_second: str = ""
    saved_bytes_per_element: str = ""
    peak_bytes: str = ""
    peak_ratio: str = ""

    def with_numbers(self, numbers: Mapping[str, float | int | None]) -> "Row":
        """This row with measured numbers: six digits, whole ones for integers, empty for None."""
        return replace(self, **{name: number_text(value) for name, value in numbers.items()})


COLUMNS = tuple(field.name for kind in (Row, Provenance) for field in fields(kind))
_CASE = ("mode", "size", "memory_format", "elements", "dtype", "hardness", "threads", "allocator")
_KEY = ("provider", "kernel", *_CASE, "clock", *(field.name for field in fields(Provenance)))


def number_text(value: float | int | None) -> str:
    """As it stands in the file."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


class ResultsFile:
    """A CSV file that rows are appended to as they are measured.

    Raises ValueError where the file exists with other columns.
    """

    def __init__(self, path: str | os.PathLike, provenance: Provenance) -> None:
        self.path = Path(path)
        self.provenance = asdict(provenance)
        self._keys = {_key(row) for row in read_rows(self.path)} if self.path.exists() else set()

    def __contains__(self, row: Row) -> bool:
        return _key(asdict(row) | self.provenance) in self._keys

    def append(self, row: Row) -> None:
        """Write it at once, so that an interruption loses nothing."""
        cells = asdict(row) | self.provenance
        new = not self.path.exists() or self.path.stat().st_size == 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(cells)
        self._keys.add(_key(cells))


def read_rows(path: str | os.PathLike) -> list[dict[str, str]]:
    """The file's rows as texts; raise ValueError where it is no file of this script."""
    text = Path(path).read_text(encoding="utf-8")
    reader = csv.DictReader(io.StringIO(text))
    rows = list(reader)
    if reader.fieldnames is not None and tuple(reader.fieldnames) != COLUMNS:
        raise ValueError(f"{path} has other columns than {', '.join(COLUMNS)}; name another file with --csv")
    # Without its end a line may lack part of its last cell, and the next row would be written behind it.
    if (text and not text.endswith("\n")) or any(None in row or None in row.values() for row in rows):
        raise ValueError(f"{path} holds a line that is cut off or too long; remove it and run again")
    return rows


def latest_rows(path: str | os.PathLike) -> list[dict[str, str]]:
    """Of rows that measure the same with other software, the last that was written."""
    latest = {tuple(row[name] for name in ("provider", *_CASE, "device")): row for row in read_rows(path)}
    return list(latest.values())


def find_provenance(device: str) -> Provenance:
    """What this process would measure on; `device` is one of DEVICES."""
    versions = package_versions()
    return Provenance(
        device=torch.cuda.get_device_name() if device == "cuda" else hardware(processes=1)["cpu"],
        torch=versions["torch"],
        triton=_version_of("triton"),
        transformers=versions["transformers"],
        hf_lgelu=versions.get("hf-lgelu", UNKNOWN),
        commit=_find_commit(),
    )


def _key(cells: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(cells[name] for name in _KEY)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _find_commit() -> str:
    commit = _git("log", "-1", "--format=%h", "--", _MEASURED_SOURCE)
    if not commit:
        return UNKNOWN
    return f"{commit}-dirty" if _git("status", "--porcelain", "--", _MEASURED_SOURCE) else commit


def _git(*words: str) -> str:
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(("git", *words), cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
