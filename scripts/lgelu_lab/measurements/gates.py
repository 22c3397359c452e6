"""What the study of gates needs beside its runs: its smooth network, converted without training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from hf_lgelu import ConversionConfig, ConversionRefusedError, convert_to_relu
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.conversion import change_of_outputs
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel, available_rows, draw_calibration, evaluate
from lgelu_lab.studies.experiments import STUDIES

GATE_COLUMNS: dict[str, str] = {
    "model": "network: smooth, that of the study",
    "way": "converted (refitted without training); in older records also step (a training step, timed)",
    "score": "the benchmark's metric on the evaluation split, of the conversion",
    "max_logit_change": "largest difference from a logit of the smooth network's on the evaluation split",
    "refusal": "why there is no converted network; null where there is",
}


@dataclass(frozen=True)
class GateSettings:
    """How much is measured.

    Args:
        rows: calibration rows of the conversion, of text tokens.
        bf16: score and compare under bfloat16 autocast; None as the run of the smooth network.
    """

    rows: int = 8192
    bf16: bool | None = None


def measure_gates(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: GateSettings
) -> list[dict[str, Any]]:
    """One row, of the converted network."""
    smooth = models["smooth"]
    original = smooth.load()
    bf16, row = bool(settings.bf16), dict.fromkeys(GATE_COLUMNS) | {"model": "smooth", "way": "converted"}
    calibration = draw_calibration(data, min(settings.rows, available_rows(data)), smooth.record.config["seed"])
    try:
        converted, _ = convert_to_relu(original, calibration, options=ConversionConfig(data_collator=benchmark.collate))
    except (ConversionRefusedError, ValueError) as refusal:  # a result of its own
        return [{**row, "refusal": str(refusal)}]
    score = evaluate(converted, benchmark, data, bf16=bf16)[benchmark.metric]
    batches = DataLoader(data.eval, batch_size=64, collate_fn=benchmark.collate)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        change = change_of_outputs(original, converted.cpu(), batches)["max_logit_change"]
    return [{**row, "score": score, "max_logit_change": change}]


GATE_OPTIONS = Measurement(
    name="gates",
    benchmarks=STUDIES["gates"].benchmarks,
    models=("smooth",),
    settings=GateSettings,
    measure=measure_gates,
    of_run=("bf16",),
)
