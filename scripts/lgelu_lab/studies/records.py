"""One run → one JSON record. No torch here, and nothing that loads it: records are read where neither is installed.

Schema, version 1 (`SCHEMA_VERSION`); every key is present, null where it does not apply, but for those that earlier
records lack:

- schema_version, name, created (UTC, ISO 8601), seconds (training and evaluation; of a resumed run with what came
  before its checkpoint), timed_from_step (null; in records of 0.2.0 the step that `seconds` are counted from, where a
  run went on from a checkpoint that kept no time)
- config: benchmark, activation, init_mode, init_hardness, high_hardness,
  temperature, hardness_lr_multiplier, harden, target_hardness, switch_fraction,
  hardening_schedule, hardening_strategy (hardening_granularity in records before 0.2.0), seed,
  and the training recipe (optimizer, learning_rate, weight_decay, train_batch_size over all processes,
  num_train_epochs, lr_scheduler_type, eval_strategy, ...); saved_epoch: whose weights load_best_model_at_end brought
  back
- data: train_samples, eval_samples, eval_split (what the metric was measured on), classes (null for text; absent in
  the earliest records), and what was read: source (the Hub id only where the Hub's data was read), copy_of (the Hub
  id in whose place a local folder was read), folder (its name), files ({file: bytes}), readme (what the folder's
  README.md says). Records that have no copy_of name the Hub id as source whatever was read
- model: parameters, activation_sites
- metric, greater_is_better
- initial_hardness: {site: λ} before training; empty without λ-GELU
- epochs: a list of {epoch, score, loss, relu_score, relu_loss, relu_max_logit_change,
  relu_unchanged_predictions, hardness: {site: λ}}; the relu_* are the same weights with ReLU at every
  smooth gate, null for a model that has none. The change and the unchanged predictions are measured for the saved
  weights alone, and null in the other evaluations; earlier records have them for every evaluation
- versions: {package: version}, and "commit", the last one that changed the sources, with "-dirty" where they differ
  from it (absent earlier, and outside a checkout); hardware: {cpu, cpu_cores, accelerators, processes, platform}
- weights: {file below the run's folder: SHA-256} of the networks saved with it; empty where none was (absent earlier)
- rows: {"loss": [...], "correct": [...], "relu_loss": [...], "relu_correct": [...]} of each evaluated row in the last
  evaluation, of benchmarks that keep them (absent earlier)
- hardness_path: in some earlier records a list of {step, site: λ} between the evaluations
- failure: why the run ended before its time; null for a whole run (absent earlier). A failed run is written as
  failed.json, with the evaluations that it had, and no list of records holds it
"""

import hashlib
import itertools
import json
import math
import os
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lgelu_lab.studies.folder import write_whole

SCHEMA_VERSION = 1
RECORD_FILE = "record.json"
FAILED_FILE = "failed.json"
ERROR_FILE = "error.txt"
RELU_FOLDER = "relu"
"""Inside a run's folder: the ReLU network of a hardened run."""

EARLIER_DEFAULTS = {
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "label_smoothing_factor": 0.0, "eval_delay": 0, "train_sampling_strategy": "random",
}  # fmt: skip
"""What a record from before an option existed was made with, where that is neither None nor False."""

UNTOLD = frozenset({"max_eval_samples", "eval_strategy", "eval_steps"})
"""Options older than their place in the record: where one is absent, nothing is known of it."""


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
    weights: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    timed_from_step: int | None = None
    rows: dict[str, list[float]] = field(default_factory=dict)
    hardness_path: list[dict[str, float]] = field(default_factory=list)

    @property
    def whole_seconds(self) -> float | None:
        """Of the whole training; None where it was resumed and a part of it not timed, which says nothing."""
        return None if self.timed_from_step else self.seconds

    @property
    def last(self) -> EpochRecord:
        """The last evaluation."""
        return self.epochs[-1]

    @property
    def saved(self) -> EpochRecord:
        """The evaluation of the weights that were saved: the last, or that which load_best_model_at_end chose."""
        epoch = self.config.get("saved_epoch")
        return next((each for each in self.epochs if each.epoch == epoch), self.last)

    @property
    def best(self) -> EpochRecord:
        """The evaluation with the best validation score as it is; the earliest of equals."""
        sign = 1 if self.greater_is_better else -1
        return max(self.epochs, key=lambda epoch: (sign * epoch.score, -epoch.epoch))

    @property
    def as_learned(self) -> EpochRecord | None:
        """The last evaluation before hardening began: λ as the loss made it; None where there is none."""
        if not self.config.get("harden"):
            return None
        if self.config.get("max_steps", -1) > 0:
            return None  # of how many epochs these are is not recorded
        # What hf_lgelu.models.hardening computes, and a test compares with: that package loads torch.
        total, fraction = math.ceil(self.config["num_train_epochs"]), self.config["switch_fraction"]
        switch = min(math.floor(fraction * total * (1 + 1e-12)), total - 1)
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


def write_record(record: RunRecord, folder: str | os.PathLike) -> Path:
    """Write `folder`/record.json, or failed.json of a failed run. It is complete or not there.

    Raises ValueError for a number that JSON has not, such as NaN.
    """
    text = json.dumps(asdict(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return write_whole(Path(folder) / (RECORD_FILE if record.failure is None else FAILED_FILE), text)


def read_record(path: str | os.PathLike) -> RunRecord:
    """Read a record file, or the one in a folder.

    Raises FileNotFoundError, or ValueError that names the file where it is of another schema or no record.
    """
    path = Path(path)
    path = path / RECORD_FILE if path.is_dir() else path
    raw = read_fields(path, RunRecord, "run record")
    config = raw["config"]
    if "hardening_granularity" in config:  # what records before 0.2.0 call how often λ moves: "epoch" or "step"
        granularity = config.pop("hardening_granularity")
        config["hardening_strategy"] = "steps" if granularity == "step" else granularity
    epochs = tuple(EpochRecord(**epoch) for epoch in raw.pop("epochs"))
    return RunRecord(epochs=epochs, **raw)


def read_records(folder: str | os.PathLike) -> list[RunRecord]:
    """Every record below a folder, in the order of their paths. Raises FileNotFoundError if there is none."""
    paths = sorted(Path(folder).rglob(RECORD_FILE))
    if not paths:
        raise FileNotFoundError(f"no {RECORD_FILE} below {folder}")
    return [read_record(path) for path in paths]


def weight_digests(folder: str | os.PathLike) -> dict[str, str]:
    """{file: SHA-256} of the weights in a run's folder and in that of its ReLU network."""
    folder = Path(folder)
    files = sorted([*folder.glob("*.safetensors"), *folder.glob(f"{RELU_FOLDER}/*.safetensors")])
    digests = {}
    for file in files:
        with file.open("rb") as opened:
            digests[file.relative_to(folder).as_posix()] = hashlib.file_digest(opened, "sha256").hexdigest()
    return digests


def require_own_weights(record: RunRecord, folder: str | os.PathLike) -> None:
    """Raise ValueError if weights in the run's folder are not those that the record was written with.

    A record from before weights were tied to it says nothing, and passes.
    """
    found = weight_digests(folder) if record.weights else {}
    foreign = sorted(name for name, digest in record.weights.items() if found.get(name) not in (None, digest))
    if foreign:
        raise ValueError(
            f"{', '.join(foreign)} in {folder} {'is' if len(foreign) == 1 else 'are'} not what its {RECORD_FILE} was "
            "written with: another run was trained into the folder, or was interrupted there. Train it again"
        )


def read_fields(path: Path, kind: type, what: str) -> dict[str, Any]:
    """The object in a JSON file, which must have the fields of the dataclass `kind`; `what` is its name in words.

    Fields with a default may be absent. Raises ValueError that names the file.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are of this kind
        raise ValueError(f"{path} is not a {what}: {error}") from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} is not a {what} that can be read here: it has schema version {version!r}, and this version of the "
            f"laboratory reads {SCHEMA_VERSION}. Read it with the version that wrote it, or write to another folder"
        )
    known = fields(kind)
    needed = {entry.name for entry in known if entry.default is MISSING and entry.default_factory is MISSING}
    missing, unknown = sorted(needed - raw.keys()), sorted(raw.keys() - {entry.name for entry in known})
    if missing or unknown:
        raise ValueError(f"{path} is not a {what}: missing {missing}, unknown {unknown}")
    return raw
