"""The trained networks that a measurement compares, on the rows of their runs: found and scored."""

import copy
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel

from hf_lgelu import LambdaGELUTrainer
from hf_lgelu.models.checkpoint import load_checkpoint
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.benchmarks.images import ImageRows
from lgelu_lab.benchmarks.table import check_benchmark
from lgelu_lab.benchmarks.token_blocks import TokenBlocks
from lgelu_lab.studies.arguments import parse_mapping, recorded_options
from lgelu_lab.studies.experiments import STUDIES, experiment_name
from lgelu_lab.studies.records import RELU_FOLDER, RunRecord, read_record, require_own_weights

# model → (the study whose run it is, which of its configurations, the folder of the network inside the run's)
_RUNS: dict[str, tuple[str, int, str]] = {
    "gelu": ("downstream", 0, ""),
    "relu": ("downstream", 1, ""),
    "lambda_gelu": ("downstream", 2, ""),
    "hardened": ("downstream", 3, ""),
    "hardened_relu": ("downstream", 3, RELU_FOLDER),
}

FEWEST_SEQUENCES = 16
"""So few sequences are only taken where there are no more: rows of one sequence are not independent."""

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
        """A fresh copy from the checkpoint: float32, on the CPU, in eval mode, laid out in memory as the run had it."""
        model = load_checkpoint(self.folder).float()
        # In bfloat16 the other memory format rounds a few predictions in ten thousand away.
        return model.to(memory_format=torch.channels_last) if self.record.config.get("channels_last") else model

    def summary(self) -> dict[str, Any]:
        """What a measurement's record says of the network."""
        saved, config = self.record.saved, self.record.config
        return {
            "run": self.record.name,
            "metric": self.record.metric,
            "score": saved.score,
            "relu_score": saved.relu_score,
            "target_hardness": config["target_hardness"] if config["harden"] else None,
        }


def find_models(runs: str | os.PathLike, benchmark: str, seed: int, names: tuple[str, ...]) -> dict[str, TrainedModel]:
    """{name: network} of one benchmark and seed, below the output folder of their study.

    Raises FileNotFoundError that says which command trains what is missing, and ValueError for weights that are not
    those of the record beside them.
    """
    found, missing = {}, []
    for name in names:
        study, place, inner = STUDIES[_RUNS[name][0]], *_RUNS[name][1:]
        if benchmark in STUDIES["pretrained"].benchmarks:
            study, place = STUDIES["pretrained"], min(place, 1)  # fine-tuned, hardened
        run = Path(runs) / study.folder / experiment_name(benchmark, study.configurations(benchmark)[place], seed)
        if (run / inner / "config.json").exists():
            found[name] = TrainedModel(name, run / inner, read_record(run))
            require_own_weights(found[name].record, run)
        else:
            missing.append(str(run / inner))
    if missing:
        raise FileNotFoundError(
            f"no trained network in {', '.join(missing)}; train them with: python scripts/study.py --study "
            f"{study.name} --benchmarks {benchmark} --seeds {seed} --output_dir {runs}"
        )
    return found


def load_data(record: RunRecord, data_dir: str | None = None) -> BenchmarkData:
    """The rows that a run was trained and evaluated on, divided and prepared as its record tells.

    Raises ValueError where other data is read than the record says.
    """
    data = check_benchmark(record.config["benchmark"]).load(*recorded_options(record.config, data_dir))
    data.origin.require_same(record.data, f"the run {record.name}")
    return data


def evaluate(
    model: PreTrainedModel, benchmark: Benchmark, data: BenchmarkData, *, bf16: bool = False
) -> dict[str, float]:
    """{"accuracy": …, "relu_accuracy": …, "loss": …, "relu_loss": …} on the evaluation rows.

    The relu_* are there where the model has smooth gates. In the model's dtype, or with `bf16` under bfloat16 autocast
    as runs with --bf16 are evaluated; on the device that accelerate chooses: the model is moved there.
    """
    with tempfile.TemporaryDirectory() as folder:
        _, training = parse_mapping({"benchmark": benchmark.name, "output_dir": folder, "disable_tqdm": True})
        training.require_lambda_gelu = False
        trainer = LambdaGELUTrainer(
            model=model,
            args=training,
            eval_dataset=data.eval,
            **benchmark.trainer_options(data),
        )
        with torch.autocast(training.device.type, torch.bfloat16, enabled=bf16):
            loop = trainer.evaluation_loop(trainer.get_eval_dataloader(), "evaluation", metric_key_prefix="eval")
    return {name.removeprefix("eval_"): float(value) for name, value in loop.metrics.items()}


def available_rows(data: BenchmarkData) -> int:
    """How many rows of features, images, or tokens there are to draw from."""
    return data.train.tokens.numel() if isinstance(data.train, TokenBlocks) else len(data.train)


def without_augmentation(rows: Dataset[Any]) -> Dataset[Any]:
    """Those rows; images neither cropped nor flipped."""
    if not isinstance(rows, ImageRows):
        return rows
    plain = copy.copy(rows)
    plain.augmentation = None
    return plain


def draw_calibration(data: BenchmarkData, rows: int, seed: int) -> Dataset[Any]:
    """`rows` training rows without replacement, all where there are fewer; a larger draw holds a smaller one.

    Of text `rows` counts tokens, in sequences of min(T, rows/16), each the beginning of a block of T. Images come as
    they are, neither cropped nor flipped.

    Raises ValueError for fewer than 32 tokens, since a sequence has at least two.
    """
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    if isinstance(data.train, TokenBlocks):
        if rows < 2 * FEWEST_SEQUENCES:
            raise ValueError(f"calibration takes at least {2 * FEWEST_SEQUENCES} tokens, got {rows}")
        tokens = data.train.tokens
        length = min(tokens.shape[1], rows // FEWEST_SEQUENCES)
        return TokenBlocks(tokens[order[: rows // length], :length])
    return Subset(without_augmentation(data.train), order[:rows].tolist())
