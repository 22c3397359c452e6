"""A few training steps around the swap: after the refit, after the direct swap, or annealing before it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_lgelu import ConversionConfig, ConversionRefusedError, convert_to_relu, replace_activations, substitute_relu
from hf_lgelu.models.sites import SMOOTH_KINDS
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel, available_rows, draw_calibration, evaluate, tune

FINETUNING_COLUMNS: dict[str, str] = {
    "model": "network that every way starts from: gelu",
    "start": "direct (swapped, then tuned), refit (refitted, then tuned), anneal (λ-GELU, every λ from 1 to the target "
    "over the steps, then swapped), gelu (tuned as it is and never swapped: the control)",
    "steps": "optimizer steps; every number is a run of its own",
    "learning_rate": "at its peak; null where there is no step",
    "rows": "calibration rows of the refit, of text tokens; null elsewhere",
    "score": "the benchmark's metric on the evaluation split, with ReLU unless the start is gelu",
    "seconds": "wall time of the refit, if there is one, and of the steps",
    "refusal": "why there is no such network; null where there is",
}

_SGD = {"lr_scheduler_type": "constant"}
_ADAMW = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 0}
_SCHEDULES: dict[str, tuple[Mapping[str, Any], tuple[float, ...]]] = {
    "mlp-digits": (_SGD, (5e-2, 5e-3)),
    "mlp-adult": (_SGD, (5e-2, 5e-3)),
    "mlp-fmnist": (_SGD, (5e-2, 5e-3)),
    "gpt2-wikitext2": (_ADAMW, (4e-4, 1e-4)),
}
_ANNEALING = {
    "harden": True,
    "hardening_schedule": "geometric",
    "hardening_strategy": "steps",
    "switch_fraction": 0.0,
    "log_hardness": False,
}


@dataclass(frozen=True)
class FinetuningSettings:
    """How much is trained.

    Args:
        steps: of the runs. At 0 nothing is annealed, since it would be the direct swap.
        learning_rates: peaks; where none is given, 5e-2 and 5e-3 (SGD, constant) for the MLPs and 4e-4 and 1e-4
            (AdamW, cosine to a tenth, no warm-up) for GPT-2. Batch and weight decay are those of the recipe.
        rows: calibration rows of the refit, of text tokens.
        seed: of the draw of those and of the order of the training rows, the same for all runs.
        bf16: train and score under bfloat16 autocast; None as the run of the GELU network.
    """

    steps: tuple[int, ...] = (0, 10, 30, 100, 300)
    learning_rates: tuple[float, ...] = ()
    rows: int = 8192
    seed: int = 0
    bf16: bool | None = None


@dataclass(frozen=True)
class _Start:
    """How a run begins and ends: the network to tune, whether it is annealed, what was fitted and for how long."""

    build: Callable[[], PreTrainedModel]
    anneals: bool = False
    rows: int | None = None
    seconds: float = 0.0
    refusal: str | None = None


def measure_finetuning(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: FinetuningSettings
) -> list[dict[str, Any]]:
    """A row per start, number of steps and learning rate."""
    _, usual = _SCHEDULES[benchmark.name]
    starts = {
        "direct": _Start(lambda: _swapped(models["gelu"].load(), SMOOTH_KINDS)),
        "refit": _refitted(models["gelu"], benchmark, data, settings),
        "anneal": _Start(lambda: _softened(models["gelu"].load(), benchmark.init_hardness), anneals=True),
        "gelu": _Start(models["gelu"].load),
    }
    rows = []
    for steps in sorted(settings.steps):
        for rate in settings.learning_rates or usual if steps else (None,):
            for name, start in starts.items():
                if steps or not start.anneals:
                    asked = {"model": "gelu", "start": name, "steps": steps, "learning_rate": rate, "rows": start.rows}
                    row = dict.fromkeys(FINETUNING_COLUMNS) | asked
                    rows.append(row | _tuned(start, benchmark, data, steps, rate, settings))
    return rows


def _tuned(
    start: _Start,
    benchmark: Benchmark,
    data: BenchmarkData,
    steps: int,
    rate: float | None,
    settings: FinetuningSettings,
) -> dict[str, Any]:
    if start.refusal is not None:
        return {"refusal": start.refusal}
    model, began = start.build(), time.perf_counter()
    if steps:
        schedule, _ = _SCHEDULES[benchmark.name]
        how = {"max_steps": steps, "learning_rate": rate, "bf16": bool(settings.bf16), **schedule}
        tune(model, benchmark, data, {**how, **(_ANNEALING if start.anneals else {})}, settings.seed)
    seconds = start.seconds + time.perf_counter() - began
    if start.anneals:
        model = _swapped(model, ("lambda_gelu",))
    return {"score": evaluate(model, benchmark, data, bf16=bool(settings.bf16))[benchmark.metric], "seconds": seconds}


def _swapped(model: PreTrainedModel, kinds: tuple[str, ...]) -> PreTrainedModel:
    substitute_relu(model, kinds=kinds)
    return model


def _softened(model: PreTrainedModel, hardness: float) -> PreTrainedModel:
    replace_activations(model, kinds=("gelu",), init_hardness=hardness)
    return model


def _refitted(trained: TrainedModel, benchmark: Benchmark, data: BenchmarkData, settings: FinetuningSettings) -> _Start:
    """The refit is made once; every run begins with its weights."""
    rows = min(settings.rows, available_rows(data))
    calibration = draw_calibration(data, rows, settings.seed)
    try:
        converted, report = convert_to_relu(
            trained.load(), calibration, options=ConversionConfig(data_collator=benchmark.collate)
        )
    except (ConversionRefusedError, ValueError) as refusal:  # a result of its own
        return _Start(trained.load, rows=rows, refusal=str(refusal))
    weights = {name: tensor.clone() for name, tensor in converted.state_dict().items()}

    def build() -> PreTrainedModel:
        model = _swapped(trained.load(), SMOOTH_KINDS)
        model.load_state_dict(weights)
        return model

    return _Start(build, rows=rows, seconds=report.seconds)


FINETUNING = Measurement(
    name="conversion-finetuning",
    benchmarks=tuple(_SCHEDULES),
    models=("gelu",),
    settings=FinetuningSettings,
    measure=measure_finetuning,
    of_run=("bf16",),
)
