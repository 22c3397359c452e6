"""Gated units without training: small LLaMAs (SwiGLU, GEGLU) on WikiText-2, trained, converted, compared."""

from typing import Any

import torch
from transformers import set_seed

import hf_lgelu
from hf_lgelu.environment import hardware, package_versions
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements.networks import draw_calibration, evaluate, tune

COLUMNS = (
    *("activation", "seed", "epochs", "tokens", "original", "direct", "refit", "kl_direct", "kl_refit"),
    *("eval_sequences", "cpu", "torch", "transformers"),
)
"""Of a row; original, direct and refit are perplexities."""
KEY = ("activation", "seed", "eval_sequences")
"""Of these, what says which row was asked for: rows judged on other sequences are others."""

_TOKENS = 8192
_EPOCHS = 6


def load_texts(data_dir: str | None = None, max_eval_samples: int | None = None) -> tuple[Benchmark, BenchmarkData]:
    """The benchmark, and its data: of the validation sequences at most so many, the first of a seeded permutation."""
    benchmark = BENCHMARKS["llama-wikitext2"]
    options = DataOptions(data_dir=data_dir, max_eval_samples=max_eval_samples)
    return benchmark, benchmark.load(options, benchmark.model_options({}))


def measure_gated(
    activation: str, seed: int, benchmark: Benchmark, data: BenchmarkData, epochs: int = _EPOCHS
) -> dict[str, Any]:
    """Train one network with "silu" or "gelu" gates, convert it, and compare both on the validation sequences."""
    set_seed(seed)
    model = benchmark.build_model(activation, data, benchmark.model_options({}))
    tune(model, benchmark, data, {"num_train_epochs": epochs}, seed)
    calibration = draw_calibration(data, _TOKENS, seed)
    converted, report = hf_lgelu.convert_to_relu(model, calibration, collate=benchmark.collate)
    scores = evaluate(model, benchmark, data)
    return {
        "activation": activation,
        "seed": seed,
        "epochs": epochs,
        "tokens": report.rows,
        "original": scores["perplexity"],
        "direct": scores["relu_perplexity"],
        "refit": evaluate(converted, benchmark, data)["perplexity"],
        "kl_direct": report.held_out.direct.kl,
        "kl_refit": report.held_out.refitted.kl,
        "eval_sequences": len(data.eval),
        "cpu": hardware(1)["cpu"],
        "torch": torch.__version__,
        "transformers": package_versions()["transformers"],
    }
