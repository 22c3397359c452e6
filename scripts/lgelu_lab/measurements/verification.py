"""Local robustness of the benchmarks' MLPs, by Marabou: what it proves, refutes, leaves open and refuses."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_lgelu import verify_robustness
from hf_lgelu.analysis.verification.marabou import marabou_refusal
from hf_lgelu.analysis.verification.robustness import STATUSES, RobustnessReport
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel

PIXEL_RANGE = {"mlp-digits": 16.0, "mlp-fmnist": 255.0}
"""Largest pixel of each benchmark in the units of its preprocessing; the smallest is 0."""

VERIFICATION_COLUMNS: dict[str, str] = {
    "model": "network",
    "epsilon": "radius of the L∞ ball, as a share of the pixels' range (0 to 1); null where the network is refused",
    "refusal": "Marabou's own words on the network's ONNX export; null where it reads it",
    "points": "correctly classified test images asked about, the first in the order of the test split",
    "misclassified": "test images passed over on the way because their class was wrong already",
    "proved": "images with the same class in the whole ball, up to the margin, in the solver's arithmetic",
    "proved_by_bounds": "of these, by symbolic bounds alone, without search",
    "refuted": "images with a counterexample that changes the class in torch, in float32 and float64",
    "refuted_by_attack": "of these, found by projected gradient descent before the solver was asked",
    "unconfirmed": "images with a counterexample of the solver that does not change the class in torch",
    "timeout": "images left open when the time ran out",
    "unknown": "images on which the solver gave up by itself",
    "median_seconds": "time per image, attack and solver together, s",
    "max_seconds": "the longest, s",
}
"""Every key of a row and what it is."""


@dataclass(frozen=True)
class VerificationSettings:
    """What is asked.

    Args:
        epsilons: radii, as shares of the pixels' range.
        points: correctly classified test images.
        timeout_seconds: of the solver, for each image and ε.
        margin: lead of a wrong class, in units of the scores, from which on a point counts as a violation.
        seed: of the attack's random starts.
    """

    epsilons: tuple[float, ...] = (0.002, 0.005, 0.01, 0.02)
    points: int = 20
    timeout_seconds: float = 5.0
    margin: float = 1e-4
    seed: int = 0


def measure_verification(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: VerificationSettings
) -> list[dict[str, Any]]:
    """A row per network that Marabou reads and ε, and one for each network that it refuses."""
    rows = []
    for name, trained in models.items():
        network = trained.load()
        refusal = marabou_refusal(network, data.test.features[:1])
        if refusal is not None:
            rows.append(dict.fromkeys(VERIFICATION_COLUMNS) | {"model": name, "refusal": refusal})
            continue
        inputs, labels, misclassified = first_correct(network, data, settings.points)
        scale, lowest, highest = pixel_units(data.preprocessing, PIXEL_RANGE[benchmark.name], inputs.shape[1])
        report = verify_robustness(
            network,
            inputs,
            labels,
            epsilons=settings.epsilons,
            scale=scale,
            input_range=(lowest, highest),
            timeout_seconds=settings.timeout_seconds,
            margin=settings.margin,
            seed=settings.seed,
        )
        rows += [_row(name, epsilon, report, misclassified) for epsilon in settings.epsilons]
    return rows


@torch.no_grad()
def first_correct(network: nn.Module, data: BenchmarkData, points: int) -> tuple[Tensor, Tensor, int]:
    """The first `points` test rows of the right class, their labels, and how many wrong ones lie between them.

    Raises ValueError if the test split has fewer.
    """
    features, labels = data.test.features, data.test.labels
    correct = (network(features).logits.argmax(-1) == labels).nonzero().flatten()
    if not 1 <= points <= len(correct):
        raise ValueError(f"points must be 1 to {len(correct)}, the test rows that the network gets right, got {points}")
    chosen = correct[:points]
    return features[chosen], labels[chosen], int(chosen[-1]) + 1 - points


def pixel_units(
    preprocessing: Mapping[str, Any], pixel_range: float, num_features: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, lowest, highest), each (F,) float64: what the pixels' range, 0 and the largest pixel are as features.

    A pixel that is constant in the training rows is 0 in every row, and cannot move.
    """
    mean, deviation = (
        np.broadcast_to(np.asarray(preprocessing[name], dtype=np.float64), (num_features,))
        for name in ("mean", "deviation")
    )
    inverse = np.divide(1.0, deviation, out=np.zeros(num_features), where=deviation > 0)
    ends = (pixel_range * inverse, -mean * inverse, (pixel_range - mean) * inverse)
    scale, lowest, highest = (torch.from_numpy(end) for end in ends)
    return scale, lowest, highest


def _row(model: str, epsilon: float, report: RobustnessReport, misclassified: int) -> dict[str, Any]:
    seconds = [result.seconds for result in report.results if result.epsilon == epsilon]
    counts = {status: report.count(epsilon, status) for status in STATUSES}
    return {
        "model": model,
        "epsilon": epsilon,
        "refusal": None,
        "points": len(seconds),
        **counts,
        "misclassified": misclassified,
        "proved_by_bounds": report.count(epsilon, "proved", "bounds"),
        "refuted_by_attack": report.count(epsilon, "refuted", "attack"),
        "median_seconds": round(statistics.median(seconds), 4),
        "max_seconds": round(max(seconds), 4),
    }


VERIFICATION = Measurement(
    name="verification",
    description="local robustness of MLPs, proved or refuted by Marabou; smooth networks refused",
    benchmarks=tuple(PIXEL_RANGE),
    models=("gelu", "relu", "lambda_gelu", "hardened_relu"),
    settings=VerificationSettings,
    measure=measure_verification,
    divisible=True,
)
"""The row of MEASUREMENTS."""
