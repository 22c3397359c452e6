"""Exact linear pieces of the benchmarks' ReLU MLPs, beside the first-order models of smooth ones."""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from hf_lgelu import local_linear_model
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel

LINEAR_PIECES_COLUMNS: dict[str, str] = {
    "model": "network",
    "refusal": "why the network has no linear pieces; null where it has",
    "points": "test rows, the first in the order of the test split",
    "distinct_regions": "different activation patterns among them; null where refused",
    "seconds": "time for all W and b with their checks, s; null where refused",
    "seconds_per_point": "the same for one row, s",
    "perturbation": "length of the random steps away from the rows, L2, in standardized features",
    "inside": "share of the perturbed rows in the region of the row; null where there are no regions",
    "max_error_float64": "largest |f(z) − (W·z + b)| in float64, units of the scores: over perturbed rows inside "
    "the region, or over all where there are no regions; null where none is inside",
    "max_error_float32": "the same with f in float32",
    "max_error_everywhere": "the same in float64 over all perturbed rows, inside or not, for every network",
}
"""Every key of a row and what it is."""

_CHUNK = 64


@dataclass(frozen=True)
class LinearPiecesSettings:
    """What is asked.

    Args:
        points: test rows, at most.
        perturbations: lengths of the random steps, L2, in standardized features.
        seed: of the steps' directions.
    """

    points: int = 1000
    perturbations: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0)
    seed: int = 0


def measure_linear_pieces(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: LinearPiecesSettings
) -> list[dict[str, Any]]:
    """A row per network and length of the steps; every network takes the same steps."""
    inputs = data.test.features[: settings.points]
    generator = torch.Generator().manual_seed(settings.seed)
    directions = torch.randn(inputs.shape, generator=generator, dtype=torch.float64)
    directions /= directions.norm(dim=1, keepdim=True)
    rows = []
    for name, trained in models.items():
        network = trained.load()
        pieces, facts = _pieces(network, inputs)
        weight, bias = (pieces.weight, pieces.bias) if pieces else first_order_models(network, inputs)
        for length in settings.perturbations:
            # Rounded to float32, so that both precisions see the same points.
            points = (inputs + length * directions).float()
            errors = _errors(network, points, weight, bias, pieces)
            rows.append({"model": name, **facts, "perturbation": length, **errors})
    return rows


def first_order_models(network: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """W (N, outputs, F) and b (N, outputs) of f(z) ≈ f(x) + J(x)·(z − x), float64: exact nowhere but at x if smooth."""
    wide = copy.deepcopy(network).double().eval()
    inputs = inputs.double()

    def scores(x: Tensor) -> Tensor:
        return wide(x[None]).logits[0]

    with torch.no_grad():
        weight = torch.cat([vmap(jacrev(scores))(part) for part in inputs.split(_CHUNK)])
        return weight, wide(inputs).logits - torch.einsum("nki,ni->nk", weight, inputs)


def _pieces(network: nn.Module, inputs: Tensor) -> tuple[Any | None, dict[str, Any]]:
    start = time.perf_counter()
    try:
        pieces = local_linear_model(network, inputs)
    except ValueError as error:
        facts = dict.fromkeys(("distinct_regions", "seconds", "seconds_per_point"))
        return None, {"refusal": str(error), "points": len(inputs), **facts}
    seconds = time.perf_counter() - start
    return pieces, {
        "refusal": None,
        "points": len(inputs),
        "distinct_regions": pieces.distinct_regions,
        "seconds": round(seconds, 4),
        "seconds_per_point": seconds / len(inputs),
    }


@torch.no_grad()
def _errors(network: nn.Module, points: Tensor, weight: Tensor, bias: Tensor, pieces: Any | None) -> dict[str, Any]:
    expected = torch.einsum("nki,ni->nk", weight, points.double()) + bias
    narrow = (network(points).logits.double() - expected).abs().amax(1)
    wide = (copy.deepcopy(network).double()(points.double()).logits - expected).abs().amax(1)
    inside = torch.ones(len(points), dtype=torch.bool) if pieces is None else pieces.same_region(points)
    some = bool(inside.any())
    return {
        "inside": None if pieces is None else inside.double().mean().item(),
        "max_error_float64": wide[inside].max().item() if some else None,
        "max_error_float32": narrow[inside].max().item() if some else None,
        "max_error_everywhere": wide.max().item(),
    }


LINEAR_PIECES = Measurement(
    name="linear_pieces",
    description="exact linear pieces of ReLU MLPs, and what a first-order model of a smooth one misses",
    benchmarks=("mlp-digits", "mlp-fmnist"),
    models=("gelu", "lambda_gelu", "hardened", "hardened_relu"),
    settings=LinearPiecesSettings,
    measure=measure_linear_pieces,
    divisible=True,
)
"""The row of MEASUREMENTS."""
