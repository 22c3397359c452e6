"""How fast λ-GELU is, and how much memory it keeps, against other activations and against a copy as the floor.

Every provider is timed in turn within one process, round by round; ratios are taken to nn.GELU (erf) within a
round. Rows go to a CSV file as they are measured, and a rerun measures only what is not there.

    python scripts/bench_activation.py --csv bench.csv
"""

import os
import sys
from dataclasses import dataclass, field

import torch
from lgelu_lab.kernel_bench.measure import DTYPES, MODES, SIZES, Bench, measure_operation, parse_size
from lgelu_lab.kernel_bench.providers import PROVIDERS, REFERENCE
from lgelu_lab.kernel_bench.results import Cells, find_provenance, results_file
from lgelu_lab.rows_file import RowsFile
from transformers import HfArgumentParser
from transformers.utils import logging

from hf_lgelu.activation.kernels import KERNEL_VARIABLE, chosen_kernel

ALLOCATORS = {
    "keep": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"},
    "stock": {},
}
"""glibc's settings by name. With "keep" freed memory stays with the process, so that page faults, which cost more
than a kernel does, are not timed. The settings are read when a process starts."""

_QUIET_PROFILER = {"KINETO_LOG_LEVEL": "99"}  # it measures memory, and would log two lines each time


@dataclass
class BenchArguments:
    """What is measured, and where the rows go."""

    csv: str = field(default="runs/bench_activation.csv", metadata={"help": "File of the rows; they are added to it."})
    providers: list[str] = field(
        default_factory=lambda: list(PROVIDERS),
        metadata={"help": "What is timed; gelu always is.", "choices": list(PROVIDERS)},
    )
    modes: list[str] = field(
        default_factory=lambda: list(MODES), metadata={"help": "What is timed.", "choices": list(MODES)}
    )
    sizes: list[str] = field(
        default_factory=lambda: list(SIZES), metadata={"help": "Such as 256x256 or 32x64x32x32:channels_last."}
    )
    dtypes: list[str] = field(
        default_factory=lambda: ["float32", "bfloat16"], metadata={"help": "Of x.", "choices": list(DTYPES)}
    )
    hardness: list[float] = field(
        default_factory=lambda: [1.0, 2.0, 20.0, 160.0], metadata={"help": "Values of λ, at least 1."}
    )
    threads: list[int] = field(default_factory=lambda: [1, 2], metadata={"help": "Threads of the CPU, one run each."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda.", "choices": ["cpu", "cuda"]})
    allocator: str = field(
        default="keep",
        metadata={
            "help": "keep: the CPU's freed memory stays with the process; stock: as glibc has it.",
            "choices": list(ALLOCATORS),
        },
    )
    rounds: int = field(default=25, metadata={"help": "At most so many rounds of each input and mode."})
    seconds: float = field(default=5.0, metadata={"help": "No further round after so long, but at least five of them."})


def main() -> None:
    """Measure, and print a line a row."""
    (arguments,) = HfArgumentParser(BenchArguments).parse_args_into_dataclasses()
    try:
        check(arguments)
        run(arguments)
    except (ValueError, OSError) as error:
        sys.exit(str(error))


def check(arguments: BenchArguments) -> None:
    """Raise ValueError, naming the argument and what it takes, before anything is measured."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA or ROCm device, and torch finds none; use --device cpu")
    for size in arguments.sizes:
        parse_size(size)
    if chosen_kernel() is not None:
        raise ValueError(
            f"{KERNEL_VARIABLE} is set, and the provider lambda_gelu is the automatic choice; unset it, and name a "
            "kernel by --providers lambda_gelu:<kernel>"
        )


def run(arguments: BenchArguments) -> None:
    """Do what the arguments, which are right, ask for."""
    if arguments.device == "cpu":
        restart_with(ALLOCATORS[arguments.allocator] | _QUIET_PROFILER)
    logging.set_verbosity_error()
    results = results_file(arguments.csv, find_provenance(arguments.device))
    for dtype in arguments.dtypes:
        for threads in arguments.threads if arguments.device == "cpu" else [1]:
            _measure(arguments, dtype, threads, results)


def _measure(arguments: BenchArguments, dtype: str, threads: int, results: RowsFile) -> None:
    allocator = arguments.allocator if arguments.device == "cpu" else "torch"
    bench = Bench(arguments.device, threads, allocator, arguments.rounds, arguments.seconds, results)
    providers = [row for name, row in PROVIDERS.items() if name in {*arguments.providers, REFERENCE}]
    for size in arguments.sizes:
        for row in measure_operation(size, dtype, providers, arguments.hardness, arguments.modes, bench):
            _say(row)


def restart_with(settings: dict[str, str]) -> None:
    """Start this process anew with these environment variables, and no other allocator's, unless it has them."""
    names = {name for values in (*ALLOCATORS.values(), settings) for name in values}
    present = {name: os.environ[name] for name in names if name in os.environ}
    if present != settings:
        environment = {name: value for name, value in os.environ.items() if name not in names} | settings
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _say(row: Cells) -> None:
    names = ("mode", "size", "memory_format", "dtype")
    words = (*(row[name] for name in names), f"{row['threads']} threads", row["allocator"])
    provider = f"{row['provider']} λ={row['hardness']}" if row["hardness"] else row["provider"]
    print(
        f"{' '.join(word for word in words if word)}: {provider} ({row['kernel']}) {row['milliseconds_median']} ms, "
        f"{row['ratio_median']} of GELU ({row['ratio_q20']} to {row['ratio_q80']})",
        flush=True,
    )


if __name__ == "__main__":
    main()
