"""Zeros of the trained networks' activations on training data: APoZ per layer, and what never fires.

APoZ is the average percentage of zeros (Network Trimming: Hu, Peng, Tai, Tang, 2016, arXiv:1607.03250, equation 1): the
share of exact zeros among a unit's outputs over rows and positions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_lgelu.activation.kernels import use_kernel
from hf_lgelu.models.sites import kind_of
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


@dataclass
class GateZeros:
    """Counts at one call of an activation, for each of its units; the tensors have shape (units,).

    `kind` is "relu", or the kind of a smooth gate. `values` counts the outputs of each unit, `zeros` those that are
    exactly 0, `off` those ≤ 0, `near_zero` those within the threshold. A gate's output is ≤ 0 exactly where its input
    is: for a smooth gate `off` counts the zeros that ReLU in its place would give.
    """

    kind: str
    values: int
    zeros: Tensor
    off: Tensor
    near_zero: Tensor
    absolute_sum: Tensor


def count_zeros(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], threshold: float = 1e-3
) -> dict[str, GateZeros]:
    """{activation: counts} over all batches, in the order in which they run; a module's later calls are "name#2", ...

    Units lie along axis 1 of images and along the last axis of all else, as in the benchmarks' networks.
    """
    counts: dict[str, GateZeros] = {}
    calls: Counter[str] = Counter()

    def count(name: str, kind: str, output: Tensor) -> None:
        calls[name] += 1
        name = name if calls[name] == 1 else f"{name}#{calls[name]}"
        axis = 1 if output.ndim == 4 else -1
        rows = output.detach().movedim(axis, -1).flatten(0, -2)
        size = rows.abs()
        new = [(rows == 0).sum(0), (rows <= 0).sum(0), (size <= threshold).sum(0), size.sum(0, dtype=torch.float64)]
        if name not in counts:
            counts[name] = GateZeros(kind, len(rows), *new)
            return
        seen = counts[name]
        seen.values += len(rows)
        for total, more in zip((seen.zeros, seen.off, seen.near_zero, seen.absolute_sum), new, strict=True):
            total += more

    handles = []
    for name, module in model.named_modules():
        kind = "relu" if type(module) is nn.ReLU else kind_of(module)
        if kind is not None:
            handles.append(
                module.register_forward_hook(lambda _, args, output, name=name, kind=kind: count(name, kind, output))
            )
    try:
        with torch.no_grad(), use_kernel("eager"):  # where a smooth gate is exactly 0 is up to its kernel
            for batch in batches:
                calls.clear()
                model.eval()(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return counts


def measure_network_zeros(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: ZerosSettings
) -> list[dict[str, Any]]:
    """A row per network and activation."""
    batches = training_batches(benchmark, data, settings.samples, settings.batch_size, settings.seed)
    return [
        {
            "model": name,
            "layer": layer,
            "gate": found.kind,
            "units": len(found.zeros),
            "values": found.values,
            "apoz": (found.zeros.double() / found.values).mean().item(),
            "off_fraction": (found.off.double() / found.values).mean().item(),
            "near_zero_fraction": (found.near_zero.double() / found.values).mean().item(),
            "mean_absolute": (found.absolute_sum / found.values).mean().item(),
            "dead_units": int((found.zeros == found.values).sum()),
            "never_on_units": int((found.off == found.values).sum()),
        }
        for name, trained in models.items()
        for layer, found in count_zeros(trained.load(), batches, settings.near_zero).items()
    ]


ZEROS = Measurement(
    name="zeros",
    benchmarks=STUDIES["downstream"].benchmarks,
    models=("gelu", "relu", "lambda_gelu", "hardened_relu"),
    settings=ZerosSettings,
    measure=measure_network_zeros,
    divisible=True,
)
