"""How long a conversion to ReLU takes and how much memory it needs, on networks with random weights.

Each is measured in a process of its own. Rows go to a CSV file as they are measured, and a rerun measures only what
is not there. Memory does not depend on what the weights are, and time hardly (from 512 features on a few strengths
more or less are tried).

    python scripts/bench_convert.py --csv bench.csv --cases mlp-4x256 gpt2-124m      two of the networks
"""

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import psutil
import torch
from lgelu_lab.benchmarks.cifar_resnet import ARCHITECTURE
from lgelu_lab.rows_file import RowsFile
from lgelu_lab.studies.arguments import exit_status
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, LlamaConfig, LlamaForCausalLM

import hf_lgelu
from hf_lgelu import MLPConfig, MLPForClassification
from hf_lgelu.environment import hardware, package_versions
from hf_lgelu.networks.batches import Batch, cut_batches
from hf_lgelu.networks.run import run_example
from hf_lgelu.refit.report import LayerRefit

Inputs = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One conversion.

    Args:
        units: rows, sequences or images given; `rows` counts tokens of sequences.
        width: features of a row at the widest layer.
        build: → (the network, its inputs), from torch's global generator.
    """

    units: int
    rows: int
    width: int
    build: Callable[[], tuple[nn.Module, Inputs]]


def _mlp(rows: int, features: int) -> tuple[nn.Module, Inputs]:
    config = MLPConfig(num_features=features, num_labels=10, hidden_act="gelu")
    return MLPForClassification(config), {"features": torch.randn(rows, features)}


def _gpt2(sequences: int, tokens: int, **config: int) -> tuple[nn.Module, Inputs]:
    model = GPT2LMHeadModel(GPT2Config(activation_function="gelu", **config))
    return model, {"input_ids": torch.randint(model.config.vocab_size, (sequences, tokens))}


def _llama(sequences: int, tokens: int, blocks: int, width: int, units: int) -> tuple[nn.Module, Inputs]:
    config = LlamaConfig(
        num_hidden_layers=blocks,
        hidden_size=width,
        intermediate_size=units,
        num_attention_heads=width // 128,
        num_key_value_heads=width // 128,
        vocab_size=2048,
    )
    return LlamaForCausalLM(config), {"input_ids": torch.randint(config.vocab_size, (sequences, tokens))}


def _resnet18(images: int) -> tuple[nn.Module, Inputs]:
    import timm

    return timm.create_model(ARCHITECTURE, num_classes=10, act_layer="gelu"), torch.randn(images, 3, 32, 32)


_SMALL_GPT2 = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 4096}
_BYTES = 1 if sys.platform == "darwin" else 1024  # of a unit in which the system counts memory

CASES: dict[str, Case] = {
    "mlp-4x256": Case(8192, 8192, 256, partial(_mlp, 8192, 784)),
    "gpt2-4x128": Case(64, 8192, 512, partial(_gpt2, 64, 128, **_SMALL_GPT2)),
    "gpt2-124m": Case(16, 16_384, 3072, partial(_gpt2, 16, 1024)),
    "resnet18-cifar": Case(1024, 1024, 4864, partial(_resnet18, 1024)),
    **{f"llama-{n}x1024": Case(16, 2048, 2816, partial(_llama, 16, 128, n, 1024, 2816)) for n in (2, 4, 8)},
    "llama-1x4096": Case(16, 2048, 11_008, partial(_llama, 16, 128, 1, 4096, 11_008)),
}
_KEY = ("case", "threads")
TIME_COLUMNS = (
    "case", "units", "rows", "width", "threads", "seconds", "processor_seconds", "forward_seconds", "least_seconds",
    "loaded_gib", "peak_gib", "outcome", "cpu", "torch", "hf_lgelu",
)  # fmt: skip
"""Of the rows of `measure_here`; in older rows some are empty.

`least_seconds` of the processor are what a refit takes at least: `_least_seconds`. `loaded_gib` is the memory with
model and inputs, before any pass; in older rows the largest until the conversion."""


def measure_here(name: str, threads: int) -> dict[str, str | float | int]:
    """Convert in this process; the second of two conversions of a small network is timed, as imports take longer."""
    case = CASES[name]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    warm, inputs = _mlp(2048, 128)
    _convert(warm.eval(), inputs)
    model, inputs = case.build()
    loaded = round(psutil.Process().memory_info().rss / 2**30, 3)
    model, before = model.eval(), time.process_time()
    for batch in cut_batches([Batch(inputs)]):
        run_example(model, batch.inputs)
    forward = time.process_time() - before
    started, before = time.perf_counter(), time.process_time()
    outcome, layers = _convert(model, inputs)
    seconds, processor = time.perf_counter() - started, time.process_time() - before
    return {
        "case": name,
        "units": case.units,
        "rows": case.rows,
        "width": case.width,
        "threads": threads,
        "seconds": round(seconds, 3),
        "processor_seconds": round(processor, 3),
        "forward_seconds": round(forward, 3),
        "least_seconds": round(2 * forward + _least_seconds(model, layers), 3),
        "loaded_gib": loaded,
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES / 2**30, 3),
        "outcome": outcome,
        "cpu": hardware(1)["cpu"],
        "torch": torch.__version__,
        "hf_lgelu": package_versions()["hf-lgelu"],
    }


def _convert(model: nn.Module, inputs: object) -> tuple[str, Sequence[LayerRefit]]:
    """(what came out, the layers); a refusal by the guard comes after all the work, and is as good a measurement."""
    try:
        return "converted", hf_lgelu.convert_to_relu(model, inputs).report.layers
    except hf_lgelu.ConversionRefusedError as error:
        if error.report is None:
            raise
        return "refused by the guard", error.report.layers


def _least_seconds(model: nn.Module, layers: Sequence[LayerRefit]) -> float:
    """Processor seconds of one Gram matrix in float32, and one factorization and solve in float64, for each layer."""
    before = time.process_time()
    for layer in layers:
        if layer.rows:
            features = torch.randn(layer.rows, layer.width)
            outputs = torch.randn(layer.rows, model.get_submodule(layer.layers[0]).weight.numel() // layer.width)
            gram, cross = (features.T @ features).double(), (features.T @ outputs).double()
            gram.diagonal().add_(layer.rows)
            torch.cholesky_solve(cross, torch.linalg.cholesky(gram))
    return time.process_time() - before


def measure_apart(name: str, threads: int) -> dict[str, str | float | int]:
    """`measure_here` in a new process, whose peak memory is that of the conversion."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_here, name, threads).result()


@dataclass
class BenchArguments:
    """What is measured, and where the rows go."""

    csv: str = field(default="runs/bench_convert.csv", metadata={"help": "File of the rows; they are added to it."})
    cases: list[str] = field(
        default_factory=lambda: list(CASES), metadata={"help": "Which conversions.", "choices": list(CASES)}
    )
    threads: int = field(default=2, metadata={"help": "Threads of the CPU."})


def main() -> int:
    """Measure what is not there; the exit status is 1, with the reason, for wrong arguments."""
    (arguments,) = HfArgumentParser(BenchArguments).parse_args_into_dataclasses()
    return exit_status(partial(_measure, arguments))


def _measure(arguments: BenchArguments) -> None:
    rows = RowsFile(arguments.csv, TIME_COLUMNS, _KEY)
    for name in arguments.cases:
        if {"case": name, "threads": arguments.threads} in rows:
            continue
        row = measure_apart(name, arguments.threads)
        rows.append(row)
        print(f"{name}: {row['seconds']} s, {row['peak_gib']} GiB, {row['outcome']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
