"""The paper's own numbers, from a JSON file that the reader of the paper writes. Nothing here knows any.

{benchmark: {configuration: {quantity: value}}}, where

- a configuration is a label as in the tables ("λ-GELU uniform, hardened") or its key as in the names of
  runs ("lambda_gelu-uniform-hardened");
- a quantity is one of QUANTITIES;
- a value is a number, or [mean, standard deviation].
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lgelu_lab.report.configurations import configuration_key, configuration_label
from lgelu_lab.report.numbers import NONE, number
from lgelu_lab.studies.experiments import INIT_MODES, STUDIES
from lgelu_lab.studies.records import RunRecord

QUANTITIES = ("best_validation_score", "best_epoch", "mean_hardness", "drift", "as_is", "substituted")
_LAMBDA = tuple(f"lambda_gelu-{mode}{end}" for mode in INIT_MODES for end in ("", "-hardened"))
CONFIGURATION_KEYS = ("gelu", "relu", "gelu-relufied", "silu", "mish", "prelu", "learnable_swish", *_LAMBDA)

NOT_AT_HAND = (
    "The paper's own values were not at hand when this was written, so the tables have no column for them; "
    "scripts/report.py --paper_values FILE adds it (format: scripts/lgelu_lab/report/paper_values.py)."
)


@dataclass(frozen=True)
class PaperValues:
    """What a file of the paper's values says: {benchmark: {configuration label or key: {quantity: (mean, std)}}}."""

    values: Mapping[str, Mapping[str, Mapping[str, tuple[float, float | None]]]] = field(default_factory=dict)

    def has(self, quantity: str) -> bool:
        """Whether any configuration has this quantity."""
        return any(quantity in row for rows in self.values.values() for row in rows.values())

    def text(self, record: RunRecord, quantity: str, digits: int) -> str:
        """ "mean ± std" of the paper for the configuration of a run; a dash where the file has none."""
        rows = self.values.get(record.config["benchmark"], {})
        row = rows.get(configuration_label(record)) or rows.get(configuration_key(record)) or {}
        if quantity not in row:
            return NONE
        mean, deviation = row[quantity]
        return number(mean, digits) + ("" if deviation is None else f" ± {number(deviation, digits)}")


def read_paper_values(path: str | os.PathLike) -> PaperValues:
    """Read such a file.

    Raises FileNotFoundError, or ValueError that names the place and what is accepted there.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    values = {}
    for benchmark, rows in _mapping(raw, f"{path}").items():
        _accept(benchmark, _benchmarks(), f"{path}: benchmark")
        values[benchmark] = {}
        for configuration, row in _mapping(rows, f"{path}: {benchmark}").items():
            where = f"{path}: {benchmark}: {configuration}"
            _accept(configuration, _configurations(), f"{path}: {benchmark}: configuration")
            for quantity in _mapping(row, where):
                _accept(quantity, QUANTITIES, f"{where}: quantity")
            values[benchmark][configuration] = {name: _value(value, f"{where}: {name}") for name, value in row.items()}
    return PaperValues(values)


def _benchmarks() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for study in STUDIES.values() for name in study.benchmarks))


def _configurations() -> tuple[str, ...]:
    labels = ["GELU", "ReLU", "GELU → ReLU at 25%, trained on", "SiLU", "Mish", "PReLU", "Swish, learnable β"]
    labels += [f"λ-GELU {mode}{end}" for mode in INIT_MODES for end in ("", ", hardened")]
    return (*labels, *CONFIGURATION_KEYS)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object of names, got {value!r}")
    return value


def _accept(name: str, accepted: tuple[str, ...], where: str) -> None:
    if name not in accepted:
        raise ValueError(f"{where} {name!r} is unknown; accepted: {', '.join(accepted)}")


def _value(value: Any, where: str) -> tuple[float, float | None]:
    pair = value if isinstance(value, list) and len(value) == 2 else [value, None]
    mean, deviation = pair
    if not _is_number(mean) or not (deviation is None or (_is_number(deviation) and deviation >= 0)):
        raise ValueError(f"{where} must be a number or [mean, standard deviation], got {value!r}")
    return float(mean), None if deviation is None else float(deviation)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
