"""The trained networks that a measurement compares, found in the output folder of a study."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_lgelu.models.checkpoint import load_checkpoint
from lgelu_lab.studies.experiments import STUDIES, Configuration, experiment_name
from lgelu_lab.studies.records import RunRecord, read_record
from lgelu_lab.studies.run import RELU_FOLDER

_STUDY = STUDIES["downstream"]
_GELU, _RELU, _LEARNED, _HARDENED = _STUDY.configurations(_STUDY.benchmarks[0])  # the same on every benchmark

# model → (what the run was configured with, the folder of the network inside the run's)
_RUNS: dict[str, tuple[Configuration, str]] = {
    "gelu": (_GELU, ""),
    "relu": (_RELU, ""),
    "lambda_gelu": (_LEARNED, ""),
    "hardened": (_HARDENED, ""),
    "hardened_relu": (_HARDENED, RELU_FOLDER),
}

MODELS: tuple[str, ...] = tuple(_RUNS)
"""gelu; relu (ReLU from the start); lambda_gelu (λ learned, soft); hardened (every λ at the target);
hardened_relu (the same weights with ReLU in the gates' place)."""


@dataclass(frozen=True)
class TrainedModel:
    """One trained network: its name in MODELS, its checkpoint folder, and the record of the run that made it."""

    name: str
    folder: Path
    record: RunRecord

    def load(self) -> PreTrainedModel:
        """A fresh copy from the checkpoint: float32, on the CPU, in eval mode."""
        return load_checkpoint(self.folder).float()

    def summary(self) -> dict[str, Any]:
        """What a measurement's record says of the network."""
        last, config = self.record.last, self.record.config
        return {
            "run": self.record.name,
            "metric": self.record.metric,
            "score": last.score,
            "relu_score": last.relu_score,
            "target_hardness": config["target_hardness"] if config["harden"] else None,
        }


def find_models(
    runs: str | os.PathLike, benchmark: str, seed: int, names: tuple[str, ...] = MODELS
) -> dict[str, TrainedModel]:
    """{name: network} of one benchmark and seed, below the output folder of the study "downstream".

    Raises FileNotFoundError that says which command trains what is missing.
    """
    found, missing = {}, []
    for name in names:
        configuration, inner = _RUNS[name]
        run = Path(runs) / _STUDY.folder / experiment_name(benchmark, configuration, seed)
        if (run / inner / "config.json").exists():
            found[name] = TrainedModel(name, run / inner, read_record(run))
        else:
            missing.append(str(run / inner))
    if missing:
        raise FileNotFoundError(
            f"no trained network in {', '.join(missing)}; train them with: python scripts/study.py --study "
            f"{_STUDY.name} --benchmarks {benchmark} --seeds {seed} --output_dir {runs}"
        )
    return found
