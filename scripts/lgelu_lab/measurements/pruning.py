"""Pruning the benchmarks' MLPs: dead units, APoZ and magnitude, with and without fine-tuning.

torch-pruning takes the units out, each with its row before the activation and its column behind it. Fewer units are
fewer parameters and operations; that is all that is promised.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hf_lgelu import MLPForClassification
from hf_lgelu.environment import require
from hf_lgelu.models.outputs import compare_models
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel, evaluate, training_batches, tune
from lgelu_lab.measurements.zeros import GateZeros, count_zeros

PRUNING_COLUMNS: dict[str, str] = {
    "model": "network",
    "criterion": "none (fine-tuned alone), dead (never fires on the calibration rows), apoz (share of outputs ≤ 0) or "
    "magnitude (L1 norm of incoming weights)",
    "rule": "fraction, one-sigma (above the layer's mean + standard deviation), or null",
    "fraction": "share of each layer's units that was to go, 0 to 1; null under another rule",
    "refusal": "why nothing was pruned; null where something was",
    "widths": "units left in each hidden layer, first to last",
    "parameters_before": "parameters of the network",
    "parameters": "parameters left",
    "calibration_max_logit_change": "largest change of a logit on the calibration rows, before fine-tuning",
    "eval_max_logit_change": "largest change of a logit on the evaluation split, before fine-tuning",
    "score_before": "the benchmark's metric on the evaluation split, unpruned",
    "score_pruned": "the same, pruned, before fine-tuning",
    "score_finetuned": "the same after fine-tuning; null where nothing was pruned",
    "finetune_epochs": "epochs of fine-tuning, by the benchmark's recipe",
    "off_fraction": "mean share of outputs ≤ 0 over the units before pruning, 0 to 1 (APoZ for ReLU)",
}


@dataclass(frozen=True)
class PruningSettings:
    """What is pruned.

    Args:
        fractions: of each layer's units, for the criteria apoz and magnitude.
        samples: training rows on which zeros are counted (calibration); all of them where there are fewer.
        finetune_epochs: after pruning, for every row alike.
        seed: of the draw of rows and of fine-tuning.
    """

    fractions: tuple[float, ...] = (0.25, 0.5, 0.75)
    samples: int = 60_000
    finetune_epochs: int = 3
    seed: int = 0


def measure_pruning(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: PruningSettings
) -> list[dict[str, Any]]:
    """A row per network, criterion and rule; one of criterion "none" is the network fine-tuned as it is."""
    calibration = training_batches(benchmark, data, settings.samples, 1024, settings.seed)
    rows = []
    for name, trained in models.items():
        model = trained.load()
        zeros = list(count_zeros(model, calibration).values())  # before an evaluation moves the model to a device
        score = evaluate(model, benchmark, data)[benchmark.metric]
        shared = dict.fromkeys(PRUNING_COLUMNS) | {
            "model": name,
            "parameters_before": model.num_parameters(),
            "score_before": score,
            "finetune_epochs": settings.finetune_epochs,
            "off_fraction": sum((site.off.double() / site.values).mean().item() for site in zeros) / len(zeros),
        }
        for asked in _choices(settings):
            row = shared | asked
            try:
                pruned = without_units(model, chosen_units(model, zeros, **asked))
            except ValueError as refusal:  # smooth gates, or nothing to remove: a result of its own
                rows.append(row | {"refusal": str(refusal)})
                continue
            rows.append(row | _measured(model, pruned, calibration, benchmark, data, settings))
    return rows


def _choices(settings: PruningSettings) -> Iterator[dict[str, Any]]:
    for criterion, rule in (("none", None), ("dead", None), ("apoz", "one-sigma")):
        yield {"criterion": criterion, "rule": rule, "fraction": None}
    for criterion in ("apoz", "magnitude"):
        for fraction in settings.fractions:
            yield {"criterion": criterion, "rule": "fraction", "fraction": fraction}


def chosen_units(
    model: MLPForClassification,
    zeros: Sequence[GateZeros],
    *,
    criterion: str,
    rule: str | None = None,
    fraction: float | None = None,
) -> list[list[int]]:
    """The units of each hidden layer that are to go; at least one of each layer stays.

    Args:
        model: the network.
        zeros: of its activations, in order.
        criterion: "none"; "dead", each output exactly 0; "apoz", the share of outputs ≤ 0, highest first; "magnitude",
            the L1 norm of the incoming weights, lowest first (arXiv:1608.08710).
        rule: "one-sigma", scores above the layer's mean plus one standard deviation, or "fraction".
        fraction: of each layer's units, rounded down, in (0, 1).

    Raises ValueError where no unit goes, and for dead units of smooth gates.
    """
    if criterion == "none":
        return [[] for _ in zeros]
    if criterion == "dead":
        smooth = sorted({site.kind for site in zeros} - {"relu"})
        if smooth:
            raise ValueError(
                f"{type(model).__name__} has smooth gates ({', '.join(smooth)}): their units never rest at exactly 0 "
                "over a range of inputs, so none is dead"
            )
        dead = [(site.zeros == site.values).nonzero().flatten().tolist() for site in zeros]
        chosen = [
            units[1:] if len(units) == len(site.zeros) else units for units, site in zip(dead, zeros, strict=True)
        ]
    else:
        if criterion == "apoz":
            scores = [site.off.double() / site.values for site in zeros]
        else:
            scores = [-layer.linear.weight.detach().double().abs().sum(1) for layer in model.layers]
        chosen = [_above(each) if rule == "one-sigma" else _highest(each, fraction or 0.0) for each in scores]
    if not any(chosen):
        raise ValueError(f"no unit of {type(model).__name__} goes by {criterion}")
    return chosen


def _highest(scores: Tensor, fraction: float) -> list[int]:
    # 0.29 · 100 is 28.999999999999996 in float64 and means 29.
    count = min(math.floor(round(fraction * len(scores), 9)), len(scores) - 1)
    return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())


def _above(scores: Tensor) -> list[int]:
    units = (scores > scores.mean() + scores.std(correction=0)).nonzero().flatten().tolist()
    if len(units) == len(scores):
        units.remove(int(scores.argmin()))
    return units


def without_units(model: MLPForClassification, units: Sequence[Sequence[int]]) -> MLPForClassification:
    """A copy of an MLP without these units of each hidden layer; its config holds the widths that are left.

    Raises ImportError without torch-pruning, TypeError for another network than an MLP.
    """
    if not isinstance(model, MLPForClassification):
        raise TypeError(f"units are taken out of an MLPForClassification, got {type(model).__name__}")
    pruning = require("torch_pruning", "benchmarks")
    pruned = copy.deepcopy(model)
    with torch.enable_grad():
        graph = pruning.DependencyGraph().build_dependency(
            pruned,
            example_inputs={"features": torch.zeros(1, model.config.num_features, device=model.device)},
            output_transform=lambda output: output.logits,
            verbose=False,
        )
    for layer, chosen in zip(pruned.layers, units, strict=True):
        if chosen:
            graph.get_pruning_group(layer.linear, pruning.prune_linear_out_channels, idxs=list(chosen)).prune()
    pruned.config.hidden_size = [layer.linear.out_features for layer in pruned.layers]
    return pruned


def _measured(
    model: MLPForClassification,
    pruned: MLPForClassification,
    calibration: DataLoader,
    benchmark: Benchmark,
    data: BenchmarkData,
    settings: PruningSettings,
) -> dict[str, Any]:
    evaluation = DataLoader(data.eval, batch_size=1024, collate_fn=benchmark.collate)
    changes = [
        max(compare_models(model, pruned, batch).max_change for batch in batches)
        for batches in (calibration, evaluation)
    ]
    found = {
        "widths": "-".join(str(size) for size in pruned.config.hidden_sizes),
        "parameters": pruned.num_parameters(),
        "calibration_max_logit_change": changes[0],
        "eval_max_logit_change": changes[1],
        "score_pruned": evaluate(pruned, benchmark, data)[benchmark.metric],
    }
    tune(pruned, benchmark, data, {"num_train_epochs": settings.finetune_epochs}, settings.seed)
    return found | {"score_finetuned": evaluate(pruned, benchmark, data)[benchmark.metric]}


PRUNING = Measurement(
    name="pruning",
    benchmarks=("mlp-digits", "mlp-fmnist"),
    models=("gelu", "relu", "hardened_relu"),
    settings=PruningSettings,
    measure=measure_pruning,
    divisible=True,
)
