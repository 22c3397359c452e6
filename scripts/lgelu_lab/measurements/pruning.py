"""Pruning the benchmarks' MLPs: dead units, APoZ and magnitude, with and without fine-tuning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hf_lgelu import measure_zeros, prune_units, remove_dead_units
from hf_lgelu.models.comparison import compare_models
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel, evaluate, training_batches, tune

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
"""Every key of a row and what it is."""


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


Prune = Callable[[PreTrainedModel, DataLoader], Any]


def measure_pruning(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: PruningSettings
) -> list[dict[str, Any]]:
    """A row per network, criterion and rule; one of criterion "none" is the network fine-tuned as it is."""
    calibration = training_batches(benchmark, data, settings.samples, 1024, settings.seed)
    rows = []
    for name, trained in models.items():
        model = trained.load()
        score = evaluate(model, benchmark, data)[benchmark.metric]
        zeros = measure_zeros(model, calibration).values()
        shared = dict.fromkeys(PRUNING_COLUMNS) | {
            "model": name,
            "parameters_before": model.num_parameters(),
            "score_before": score,
            "finetune_epochs": settings.finetune_epochs,
            "off_fraction": sum(site.off_fraction.mean().item() for site in zeros) / len(zeros),
        }
        for (criterion, rule, fraction), prune in _choices(settings).items():
            asked = shared | {"criterion": criterion, "rule": rule, "fraction": fraction}
            rows.append(asked | _pruned(trained.load(), prune, calibration, benchmark, data, settings))
    return rows


def _choices(settings: PruningSettings) -> dict[tuple[str, str | None, float | None], Prune | None]:
    choices: dict[tuple[str, str | None, float | None], Prune | None] = {
        ("none", None, None): None,
        ("dead", None, None): remove_dead_units,
        ("apoz", "one-sigma", None): partial(prune_units, threshold="one-sigma"),
    }
    for criterion in ("apoz", "magnitude"):
        for fraction in settings.fractions:
            choices[criterion, "fraction", fraction] = partial(prune_units, fraction=fraction, criterion=criterion)
    return choices


def _pruned(
    model: PreTrainedModel,
    prune: Prune | None,
    calibration: DataLoader,
    benchmark: Benchmark,
    data: BenchmarkData,
    settings: PruningSettings,
) -> dict[str, Any]:
    pruned = model
    if prune is not None:
        try:
            pruned = prune(model, calibration).model
        except ValueError as refusal:  # smooth gates, or nothing to remove: a result of its own
            return {"refusal": str(refusal)}
    found = {
        "widths": "-".join(str(size) for size in pruned.config.hidden_sizes),
        "parameters": pruned.num_parameters(),
        "calibration_max_logit_change": _max_logit_change(model, pruned, calibration),
        "eval_max_logit_change": _max_logit_change(
            model, pruned, DataLoader(data.eval, batch_size=1024, collate_fn=benchmark.collate)
        ),
        "score_pruned": evaluate(pruned, benchmark, data)[benchmark.metric],
    }
    tune(pruned, benchmark, data, {"num_train_epochs": settings.finetune_epochs}, settings.seed)
    return found | {"score_finetuned": evaluate(pruned, benchmark, data)[benchmark.metric]}


def _max_logit_change(model: PreTrainedModel, pruned: PreTrainedModel, batches: DataLoader) -> float:
    return max(compare_models(model, pruned, batch).max_change for batch in batches)


PRUNING = Measurement(
    name="pruning",
    description="MLPs without dead units, and pruned by APoZ and by magnitude, before and after fine-tuning",
    benchmarks=("mlp-digits", "mlp-fmnist"),
    models=("gelu", "relu", "hardened_relu"),
    settings=PruningSettings,
    measure=measure_pruning,
    divisible=True,
)
"""The row of MEASUREMENTS."""
