"""Zeros of the trained networks' activations on training data: APoZ per layer, and what never fires."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_lgelu import measure_zeros
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel, training_batches
from lgelu_lab.studies.experiments import STUDIES

ZEROS_COLUMNS: dict[str, str] = {
    "model": "network",
    "layer": "activation module, in the order in which they run",
    "gate": "relu, gelu or lambda_gelu",
    "units": "units (channels) of the activation",
    "values": "outputs counted of each unit: training rows × positions",
    "apoz": "share of exact zeros, mean over units (average percentage of zeros), 0 to 1",
    "off_fraction": "share of outputs ≤ 0, mean over units, 0 to 1: apoz for ReLU, its like for smooth gates",
    "near_zero_fraction": "share of outputs with |a| ≤ the setting near_zero, mean over units, 0 to 1",
    "mean_absolute": "mean |a|, in units of the activation",
    "dead_units": "units whose every output is exactly 0",
    "never_on_units": "units whose every output is ≤ 0",
}
"""Every key of a row and what it is."""


@dataclass(frozen=True)
class ZerosSettings:
    """What is counted.

    Args:
        samples: training rows, drawn without replacement; all of them where there are fewer.
        batch_size: rows of a forward pass.
        near_zero: bound of `near_zero_fraction`, in units of the activation.
        seed: of the draw.
    """

    samples: int = 10_000
    batch_size: int = 64
    near_zero: float = 1e-3
    seed: int = 0


def measure_network_zeros(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: ZerosSettings
) -> list[dict[str, Any]]:
    """A row per network and activation."""
    batches = training_batches(benchmark, data, settings.samples, settings.batch_size, settings.seed)
    rows = []
    for name, trained in models.items():
        counts = measure_zeros(trained.load(), batches, threshold=settings.near_zero)
        rows += [_row(name, layer, zeros) for layer, zeros in counts.items()]
    return rows


def _row(model: str, layer: str, zeros: Any) -> dict[str, Any]:
    return {
        "model": model,
        "layer": layer,
        "gate": zeros.kind,
        "units": len(zeros.zeros),
        "values": zeros.values,
        "apoz": zeros.apoz.mean().item(),
        "off_fraction": zeros.off_fraction.mean().item(),
        "near_zero_fraction": zeros.near_zero_fraction.mean().item(),
        "mean_absolute": zeros.mean_absolute.mean().item(),
        "dead_units": len(zeros.dead_units),
        "never_on_units": int((zeros.off == zeros.values).sum()),
    }


ZEROS = Measurement(
    name="zeros",
    description="zeros of the activations on training data (APoZ), layer by layer; no speed-up is claimed",
    benchmarks=STUDIES["downstream"].benchmarks,
    models=("gelu", "relu", "lambda_gelu", "hardened_relu"),
    settings=ZerosSettings,
    measure=measure_network_zeros,
    divisible=True,
)
"""The row of MEASUREMENTS."""
