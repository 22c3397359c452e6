"""Exact linear pieces of the benchmarks' ReLU MLPs, beside the first-order models of smooth ones.

Inputs on which the same ReLUs are on share one affine function W·x + b (OpenBox: Chu et al., "Exact and Consistent
Interpretation for Piecewise Linear Neural Networks", KDD 2018, arXiv:1802.06259). A smooth network has no such pieces.
"""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from hf_lgelu import MLPForClassification
from hf_lgelu.models.smooth_calls import find_smooth_calls
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel

LINEAR_PIECES_COLUMNS: dict[str, str] = {
    "model": "network",
    "refusal": "why the network has no linear pieces; null where it has",
    "points": "test rows, the first in the order of the test split",
    "distinct_regions": "different activation patterns among them; null where refused",
    "seconds": "time for all W and b and the patterns, s; null where refused (until 0.2.0 with checks of them)",
    "seconds_per_point": "the same for one row, s",
    "perturbation": "length of the random steps away from the rows, L2, in standardized features",
    "inside": "share of the perturbed rows in the region of the row; null where there are no regions",
    "max_error_float64": "largest |f(z) − (W·z + b)| in float64, units of the scores: over perturbed rows inside "
    "the region, or over all where there are no regions; null where none is inside",
    "max_error_float32": "the same with f in float32",
    "max_error_everywhere": "the same in float64 over all perturbed rows, inside or not, for every network",
}

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
        wide = copy.deepcopy(network).double()
        facts: dict[str, Any] = dict.fromkeys(("distinct_regions", "seconds", "seconds_per_point"))
        refusal, pattern = _refusal(network, inputs), None
        start = time.perf_counter()
        weight, bias = first_order_models(wide, inputs)
        if refusal is None:
            pattern = activation_pattern(wide, inputs)
            seconds = time.perf_counter() - start
            regions = len(torch.unique(pattern, dim=0))
            facts = {
                "distinct_regions": regions,
                "seconds": round(seconds, 4),
                "seconds_per_point": seconds / len(inputs),
            }
        facts |= {"refusal": refusal, "points": len(inputs)}
        for length in settings.perturbations:
            # Rounded to float32, so that both precisions see the same points.
            points = (inputs + length * directions).float()
            inside = None if pattern is None else (activation_pattern(wide, points) == pattern).all(1)
            errors = _errors(network, wide, points, weight, bias, inside)
            rows.append({"model": name, **facts, "perturbation": length, **errors})
    return rows


def _refusal(network: nn.Module, inputs: Tensor) -> str | None:
    """Why an MLP has no linear pieces; None where it has. TypeError for another network."""
    if not isinstance(network, MLPForClassification):
        raise TypeError(f"linear pieces are those of an MLPForClassification, got {type(network).__name__}")
    calls = find_smooth_calls(network, inputs[:1])
    if not calls:
        return None
    more = f"; and {len(calls) - 3} more" if len(calls) > 3 else ""
    return (
        f"the network is smooth and has no linear pieces: {'; '.join(str(call) for call in calls[:3])}{more}. "
        "Harden λ-GELU and call hf_lgelu.substitute_relu(model) first"
    )


def first_order_models(wide: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """W (N, outputs, F) and b (N, outputs) of f(z) ≈ W·z + b around each input, of a network in float64.

    For a ReLU network it is f itself on the region of the input; of a smooth one it holds at the input alone.
    """
    inputs = inputs.double()

    def scores(x: Tensor) -> Tensor:
        return wide(x[None]).logits[0]

    with torch.no_grad():
        weight = torch.cat([vmap(jacrev(scores))(part) for part in inputs.split(_CHUNK)])
        return weight, wide(inputs).logits - torch.einsum("nki,ni->nk", weight, inputs)


@torch.no_grad()
def activation_pattern(wide: nn.Module, inputs: Tensor) -> Tensor:
    """(N, units) bool: which ReLU of a network in float64 is on; at an input of exactly 0 it is off, as in torch."""
    seen: list[Tensor] = []
    relus = [module for module in wide.modules() if isinstance(module, nn.ReLU)]
    handles = [relu.register_forward_pre_hook(lambda _, args: seen.append(args[0] > 0)) for relu in relus]
    try:
        wide(inputs.double())
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat(seen, 1)


@torch.no_grad()
def _errors(
    network: nn.Module, wide: nn.Module, points: Tensor, weight: Tensor, bias: Tensor, inside: Tensor | None
) -> dict[str, Any]:
    expected = torch.einsum("nki,ni->nk", weight, points.double()) + bias
    in_float32 = (network(points).logits.double() - expected).abs().amax(1)
    in_float64 = (wide(points.double()).logits - expected).abs().amax(1)
    counted = torch.ones(len(points), dtype=torch.bool) if inside is None else inside
    some = bool(counted.any())
    return {
        "inside": None if inside is None else inside.double().mean().item(),
        "max_error_float64": in_float64[counted].max().item() if some else None,
        "max_error_float32": in_float32[counted].max().item() if some else None,
        "max_error_everywhere": in_float64.max().item(),
    }


LINEAR_PIECES = Measurement(
    name="linear_pieces",
    benchmarks=("mlp-digits", "mlp-fmnist"),
    models=("gelu", "lambda_gelu", "hardened", "hardened_relu"),
    settings=LinearPiecesSettings,
    measure=measure_linear_pieces,
    divisible=True,
)
