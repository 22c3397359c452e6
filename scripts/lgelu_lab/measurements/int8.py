"""Float32 and int8 of the benchmarks' networks in onnxruntime: score, size, agreement, latency, what stays float."""

import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import EvalPrediction

from hf_lgelu import export_onnx, quantize_onnx
from hf_lgelu.comparing.comparison import OutputComparison
from hf_lgelu.environment import require
from hf_lgelu.export.onnx_run import OnnxModel
from hf_lgelu.export.quantize import QUANTIZED_OPERATIONS
from hf_lgelu.networks.sites import find_relu_sites, find_sites
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel, without_augmentation
from lgelu_lab.studies.experiments import STUDIES

FLOAT32 = "float32"

# Of the benchmarks' networks; where onnxruntime has one on integers, or clips, none of these is left.
_FLOAT_ACTIVATIONS = ("Relu", "Gelu", "FastGelu", "BiasGelu", "QuickGelu", "Erf", "Tanh", "Sigmoid")
_INTEGER_LAYERS = (
    *("QGemm", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat"),
    *("DynamicQuantizeMatMul", "QAttention"),
)

PRECISIONS: tuple[str, ...] = (FLOAT32, *(f"int8-{operations}" for operations in QUANTIZED_OPERATIONS))
"""float32; int8-all: every operation that onnxruntime can; int8-layers: convolutions and matrix products alone."""

INT8_COLUMNS: dict[str, str] = {
    "model": "network",
    "precision": "float32, int8-all (every operation that can be) or int8-layers (Conv, Gemm and MatMul alone)",
    "batch_size": "rows of one call in the latencies; what is not a latency is the same for every batch size",
    "metric": "the benchmark's metric",
    "score": "the metric in onnxruntime on the rows evaluated, the first of the evaluation split",
    "evaluated_rows": "rows evaluated",
    "same_argmax": "share of predictions (a row's class, or a token's) equal to torch's",
    "max_logit_difference": "largest difference of a logit from torch's on the rows evaluated",
    "file_bytes": "size of the ONNX file, bytes",
    "activations": "activations in the exported graph",
    "float_activations": "of these, computed in float in the graph that onnxruntime runs",
    "integer_layers": "convolutions and matrix products in integers there",
    "quantize_nodes": "nodes that turn float into integers there",
    "dequantize_nodes": "nodes that turn integers into float there",
    "median_ms": "median over the rounds of the mean time of a call, ms, single thread; in each round every network, "
    "precision and batch size is timed once, in a new random order",
}


@dataclass(frozen=True)
class Int8Settings:
    """What is asked.

    Args:
        calibration_rows: drawn from the training split; all of them if it has fewer.
        precisions: of PRECISIONS.
        batch_sizes: of the latencies.
        max_evaluation_rows: None for the whole evaluation split.
        evaluation_batch_size: rows of one call there.
        rounds: of the latencies.
        min_round_seconds: calls are repeated in a round until it is expected to take as long.
        seed: of the calibration rows and of the order in each round.
    """

    calibration_rows: int = 256
    precisions: tuple[str, ...] = PRECISIONS
    batch_sizes: tuple[int, ...] = (1, 64)
    max_evaluation_rows: int | None = None
    evaluation_batch_size: int = 64
    rounds: int = 30
    min_round_seconds: float = 0.005
    seed: int = 0


@dataclass
class _Variant:
    """One network in one precision: its session, and what is known of it so far."""

    model: str
    precision: str
    session: OnnxModel
    facts: dict[str, Any]
    predictions: list[np.ndarray] = field(default_factory=list)
    change: OutputComparison = field(default_factory=OutputComparison)


def measure_int8(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: Int8Settings
) -> list[dict[str, Any]]:
    """A row per network, precision and batch size; all latencies from one interleaved run."""
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(settings.seed))
    drawn = Subset(without_augmentation(data.train), order[: settings.calibration_rows].tolist())
    batches = DataLoader(drawn, batch_size=16, collate_fn=benchmark.collate)
    calibration = [_inputs(batch) for batch in batches]
    variants = []
    with tempfile.TemporaryDirectory() as folder:
        for name, trained in models.items():
            network = trained.load()
            made = _variants(name, network, Path(folder), calibration, settings)
            _evaluate(network, made, benchmark, data.eval, settings)
            variants += made
    latencies = _latencies(variants, benchmark, data.eval, settings)
    return [
        {"model": v.model, "precision": v.precision, "batch_size": size, **v.facts, "median_ms": latencies[key]}
        for v in variants
        for size in settings.batch_sizes
        if (key := (v.model, v.precision, size))
    ]


def _variants(
    name: str, network: nn.Module, folder: Path, calibration: list[dict[str, np.ndarray]], settings: Int8Settings
) -> list[_Variant]:
    """The network in every precision."""
    file = folder / f"{name}.onnx"
    example = {key: torch.from_numpy(array[:4]) for key, array in calibration[0].items()}
    export_onnx(network, file, example)
    activations = len(find_sites(network)) + len(find_relu_sites(network))
    made = []
    for precision in settings.precisions:
        if precision == FLOAT32:
            path, counts, in_float = file, _count_operations(file, folder), activations
        else:
            path = folder / f"{name}-{precision}.onnx"
            quantize_onnx(file, path, calibration, operations=precision.removeprefix("int8-"))
            counts = _count_operations(path, folder)
            in_float = sum(counts[operation] for operation in _FLOAT_ACTIVATIONS)
        facts = {
            "file_bytes": path.stat().st_size,
            "activations": activations,
            "float_activations": in_float,
            "integer_layers": sum(counts[operation] for operation in _INTEGER_LAYERS),
            "quantize_nodes": counts["QuantizeLinear"],
            "dequantize_nodes": counts["DequantizeLinear"],
        }
        made.append(_Variant(name, precision, OnnxModel(path), facts))
    return made


def _count_operations(path: Path, folder: Path) -> Counter[str]:
    """{operation: nodes} of the graph that onnxruntime makes of a file and runs on this CPU."""
    onnx, runtime = require("onnx", "onnx"), require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # it warns that the saved graph is for this kind of CPU
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


@torch.no_grad()
def _evaluate(
    network: nn.Module, variants: list[_Variant], benchmark: Benchmark, rows: Dataset[Any], settings: Int8Settings
) -> None:
    """Score every variant, and compare its logits with torch's, batch by batch."""
    count = len(rows) if settings.max_evaluation_rows is None else min(len(rows), settings.max_evaluation_rows)
    labels = []
    for start in range(0, count, settings.evaluation_batch_size):
        batch = _take(rows, benchmark, list(range(start, min(count, start + settings.evaluation_batch_size))))
        inputs = _inputs(batch)
        wanted = network(**{name: torch.from_numpy(array) for name, array in inputs.items()}).logits
        labels.append(batch["labels"].numpy())
        for variant in variants:
            found = [torch.from_numpy(output) for output in variant.session(inputs)]
            variant.predictions.append(_predictions(found, batch["labels"], benchmark))
            variant.change.add(wanted, found[0], kind="scores")
    label_ids = np.concatenate(labels)
    for variant in variants:
        variant.facts |= {
            "metric": benchmark.metric,
            "score": _score(variant.predictions, label_ids, benchmark),
            "evaluated_rows": count,
            "same_argmax": variant.change.agreement,
            "max_logit_difference": variant.change.largest_change,
        }
        variant.predictions.clear()


def _latencies(
    variants: list[_Variant], benchmark: Benchmark, rows: Dataset[Any], settings: Int8Settings
) -> dict[tuple[str, str, int], float]:
    """{(model, precision, batch size): median time of a call, ms}, every one timed once in each round."""
    jobs = {}
    for size in settings.batch_sizes:
        inputs = _inputs(_take(rows, benchmark, [i % len(rows) for i in range(size)]))
        jobs |= {(v.model, v.precision, size): (v.session, inputs) for v in variants}
    calls = {}
    for key, job in jobs.items():
        _time(*job, 3)  # the first calls allocate
        fastest = min(_time(*job, 1) for _ in range(5))
        calls[key] = max(1, math.ceil(settings.min_round_seconds / fastest))
    times: dict[tuple[str, str, int], list[float]] = {key: [] for key in jobs}
    keys, generator = list(jobs), np.random.default_rng(settings.seed)
    for _ in range(settings.rounds):
        for i in generator.permutation(len(keys)):
            times[keys[i]].append(_time(*jobs[keys[i]], calls[keys[i]]) * 1e3)
    return {key: round(statistics.median(values), 6) for key, values in times.items()}


def _time(session: OnnxModel, inputs: dict[str, np.ndarray], calls: int) -> float:
    """Seconds a call."""
    started = time.perf_counter()
    for _ in range(calls):
        session(inputs)
    return (time.perf_counter() - started) / calls


def _take(rows: Dataset[Any], benchmark: Benchmark, numbers: list[int]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in benchmark.collate(rows.__getitems__(numbers)).items()}


def _inputs(batch: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in batch.items() if name != "labels"}


def _predictions(outputs: list[Tensor], labels: Tensor, benchmark: Benchmark) -> np.ndarray:
    kept = outputs[0] if benchmark.preprocess_logits is None else benchmark.preprocess_logits(outputs, labels)
    return kept.numpy()


def _score(predictions: list[np.ndarray], labels: np.ndarray, benchmark: Benchmark) -> float:
    found = benchmark.compute_metrics(EvalPrediction(predictions=np.concatenate(predictions), label_ids=labels))
    return float(found[benchmark.metric])


INT8 = Measurement(
    name="int8",
    benchmarks=STUDIES["downstream"].benchmarks,
    models=("gelu", "relu", "lambda_gelu", "hardened_relu"),
    settings=Int8Settings,
    measure=measure_int8,
)
