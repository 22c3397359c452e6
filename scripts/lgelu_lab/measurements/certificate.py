"""The certified and the measured change of an MLP's scores when ReLU takes λ-GELU's place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_lgelu import certify_substitution
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel

CERTIFICATE_COLUMNS: dict[str, str] = {
    "model": "network",
    "rows": "test rows",
    "gate_bound": "largest κ/λ of a gate, in units of its output",
    "measured_gate_error": "largest |λ-GELU − ReLU| of a gate on the test rows, same units",
    "bound": "no score of any input moves by more; in units of the scores, exact arithmetic",
    "input_bound": "no score of a test row moves by more; same units",
    "measured": "largest change of a score on the test rows, in float64; same units",
    "ratio": "bound / measured",
    "input_ratio": "input_bound / measured",
    "certified_fraction": "share of test rows whose predicted class provably stays",
    "unchanged_predictions": "share of test rows whose predicted class stays when swapped",
}
"""Every key of a row and what it is."""


@dataclass(frozen=True)
class CertificateSettings:
    """What is asked. `batch_size` is the number of rows bounded at a time."""

    batch_size: int = 256


def measure_certificate(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: CertificateSettings
) -> list[dict[str, Any]]:
    """A row per network."""
    return [_row(name, trained, data, settings) for name, trained in models.items()]


def _row(name: str, trained: TrainedModel, data: BenchmarkData, settings: CertificateSettings) -> dict[str, Any]:
    found = certify_substitution(trained.load(), data.test.features, batch_size=settings.batch_size)
    return {
        "model": name,
        "rows": found.rows,
        "gate_bound": max(site.bound for site in found.sites),
        "measured_gate_error": max(site.measured for site in found.sites),
        "bound": found.bound,
        "input_bound": found.input_bounds,
        "measured": found.measured,
        "ratio": found.bound / found.measured if found.measured else None,
        "input_ratio": found.input_bounds / found.measured if found.measured else None,
        "certified_fraction": found.certified_fraction,
        "unchanged_predictions": found.unchanged_predictions,
    }


CERTIFICATE = Measurement(
    name="certificate",
    description="how far ReLU in λ-GELU's place can move the scores: bounds beside the measured change",
    benchmarks=("mlp-digits", "mlp-fmnist"),
    models=("lambda_gelu", "hardened"),
    settings=CertificateSettings,
    measure=measure_certificate,
    divisible=True,
)
"""The row of MEASUREMENTS."""
