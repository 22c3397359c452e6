"""One run → one JSON record. No torch here: records are read where nothing else is installed.

Schema, version 1 (`SCHEMA_VERSION`); every key is present, null where it does not apply:

- schema_version, name, created (UTC, ISO 8601), seconds (training and
  evaluation; of a resumed run since it was resumed)
- config: benchmark, activation, init_mode, init_hardness, high_hardness, temperature,
  hardness_lr_multiplier, harden, target_hardness, switch_fraction, hardening_schedule,
  hardening_strategy, seed, and the training recipe (optimizer, learning_rate, weight_decay,
  train_batch_size over all processes, num_train_epochs, lr_scheduler_type, ...)
- data: train_samples, eval_samples, eval_split (what the metric was measured on), source, and classes
  (null for text; absent in the earliest records)
- model: parameters, activation_sites
- metric, greater_is_better
- initial_hardness: {site: λ} before training; empty without λ-GELU
- epochs: a list of {epoch, score, loss, relu_score, relu_loss, relu_max_logit_change,
  relu_unchanged_predictions, hardness: {site: λ}}; the relu_* are the same weights with ReLU at every
  smooth gate, null for a model that has none
- versions: {package: version}; hardware: {cpu, cpu_cores, accelerators, processes, platform}
"""

import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_lgelu.training.schedules import switch_position

SCHEMA_VERSION = 1
RECORD_FILE = "record.json"


@dataclass(frozen=True)
class EpochRecord:
    """One evaluation: `epoch` may have a fraction. The relu_* belong to the ReLU substitution."""

    epoch: float
    score: float
    loss: float | None = None
    relu_score: float | None = None
    relu_loss: float | None = None
    relu_max_logit_change: float | None = None
    relu_unchanged_predictions: float | None = None
    hardness: dict[str, float] = field(default_factory=dict)

    @property
    def mean_hardness(self) -> float | None:
        """Mean λ over the sites; None without λ-GELU."""
        return sum(self.hardness.values()) / len(self.hardness) if self.hardness else None


@dataclass(frozen=True)
class RunRecord:
    """One seed of one configuration; the keys are described at the top of this file."""

    name: str
    created: str
    seconds: float
    config: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, Any]
    metric: str
    greater_is_better: bool
    initial_hardness: dict[str, float]
    epochs: tuple[EpochRecord, ...]
    versions: dict[str, str]
    hardware: dict[str, Any]
    schema_version: int = SCHEMA_VERSION

    @property
    def last(self) -> EpochRecord:
        """The last evaluation."""
        return self.epochs[-1]

    @property
    def best(self) -> EpochRecord:
        """The evaluation with the best validation score as it is; the earliest of equals."""
        return self._best(self.epochs, lambda epoch: epoch.score)

    @property
    def best_substituted(self) -> EpochRecord | None:
        """The evaluation with the best score under substitution; None where nothing was substituted."""
        substituted = tuple(epoch for epoch in self.epochs if epoch.relu_score is not None)
        return self._best(substituted, lambda epoch: epoch.relu_score) if substituted else None

    @property
    def as_learned(self) -> EpochRecord | None:
        """The last evaluation before hardening began: λ as the loss made it; None where there is none."""
        if not self.config.get("harden"):
            return None
        switch = switch_position(math.ceil(self.config["num_train_epochs"]), self.config["switch_fraction"])
        return max((epoch for epoch in self.epochs if epoch.epoch <= switch), key=lambda e: e.epoch, default=None)

    @property
    def drift(self) -> float | None:
        """V_λ = (1/L)·Σ_ℓ Σ_e |λ_ℓ(e+1) − λ_ℓ(e)| over the evaluations; None without λ-GELU (the paper)."""
        sites = self.last.hardness
        if not sites:
            return None
        path = [epoch.hardness for epoch in self.epochs]
        moved = [abs(after[site] - before[site]) for before, after in itertools.pairwise(path) for site in sites]
        return sum(moved) / len(sites)

    def _best(self, epochs: tuple[EpochRecord, ...], score: Callable[[EpochRecord], float]) -> EpochRecord:
        sign = 1 if self.greater_is_better else -1
        return max(epochs, key=lambda epoch: (sign * score(epoch), -epoch.epoch))


def write_record(record: RunRecord, folder: str | os.PathLike) -> Path:
    """Write `folder`/record.json. It is complete or not there: written beside, then renamed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / RECORD_FILE
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".record-", suffix=".json")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(record), file, indent=1, ensure_ascii=False, allow_nan=False)
            file.write("\n")
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide the record from the people it is shared with
        os.replace(temporary, target)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, f"{error.strerror}; the record was not written", str(target)) from error
        raise
    return target


def read_record(path: str | os.PathLike) -> RunRecord:
    """Read a record file, or the one in a folder.

    Raises FileNotFoundError, or ValueError for a file of another schema or one that is no record.
    """
    path = Path(path)
    path = path / RECORD_FILE if path.is_dir() else path
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a run record: {error}") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has record schema version {version!r}; this version of hf_lgelu reads {SCHEMA_VERSION}. Write new "
            "runs to another folder, or read this one with the version that wrote it"
        )
    names = {entry.name for entry in fields(RunRecord)}
    if raw.keys() != names:
        raise ValueError(
            f"{path} is not a run record: missing {sorted(names - raw.keys())}, unknown {sorted(raw.keys() - names)}"
        )
    _rename_old_keys(raw["config"])
    epochs = tuple(EpochRecord(**epoch) for epoch in raw.pop("epochs"))
    return RunRecord(epochs=epochs, **raw)


def _rename_old_keys(config: dict[str, Any]) -> None:
    """Records written before 0.2.0 call how often λ moves its granularity, "epoch" or "step"."""
    if "hardening_granularity" in config:
        config["hardening_strategy"] = {"step": "steps"}.get(*[config.pop("hardening_granularity")] * 2)


def read_records(folder: str | os.PathLike) -> list[RunRecord]:
    """Every record below a folder, in the order of their paths. Raises FileNotFoundError if there is none."""
    paths = sorted(Path(folder).rglob(RECORD_FILE))
    if not paths:
        raise FileNotFoundError(f"no {RECORD_FILE} below {folder}")
    return [read_record(path) for path in paths]
