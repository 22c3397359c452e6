"""The trained networks that a measurement compares, found in the output folder of a study."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, PreTrainedModel

from hf_lgelu.models.mlp import MLPForClassification
from hf_lgelu.studies.experiments import STUDIES, experiment_name
from hf_lgelu.studies.records import RunRecord, read_record
from hf_lgelu.studies.run import RELU_FOLDER

_STUDY = STUDIES["downstream"]
_HARDENED = {"activation": "lambda_gelu", "init_mode": "uniform", "harden": True}

# model → (what the run was configured with, the folder of the network inside the run's)
_RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "gelu": ({"activation": "gelu"}, ""),
    "relu": ({"activation": "relu"}, ""),
    "lambda_gelu": ({"activation": "lambda_gelu", "init_mode": "uniform"}, ""),
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
        return _model_class(self.folder).from_pretrained(self.folder).float().eval()

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


def _model_class(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    if config.model_type == MLPForClassification.config_class.model_type:
        return MLPForClassification
    causal = any("CausalLM" in name or "LMHead" in name for name in config.architectures or ())
    return AutoModelForCausalLM if causal else AutoModelForImageClassification
