"""What a step of training with λ-GELU costs: LambdaGELUTrainer against transformers' own Trainer with GELU.

The same network, while λ is learned and while it hardens. All are timed in turn, without the first steps; the figures
are medians over the rounds.

    python scripts/bench_trainer.py --benchmarks mlp-digits --rounds 5
"""

import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.studies.arguments import OneLineParser, RunArguments, data_options, model_options, parse_mapping
from lgelu_lab.studies.run import build_model, timm_optimizer
from lgelu_lab.studies.study import parse_settings
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as HFTrainingArguments

from hf_lgelu import LambdaGELUTrainer, LambdaGELUTrainingArguments
from hf_lgelu.activation.gates import GATES


@dataclass
class BenchArguments:
    """What is compared, and how often."""

    benchmarks: list[str] = field(default_factory=lambda: list(BENCHMARKS), metadata={"help": "Rows of BENCHMARKS."})
    steps: int = field(default=20, metadata={"help": "Timed optimizer steps a round; two more come before them."})
    rounds: int = field(default=3, metadata={"help": "Rounds of each kind."})
    settings: list[str] = field(
        default_factory=list, metadata={"help": "Arguments of scripts/train.py, e.g. bf16=true image_size=64."}
    )


class _Clock(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    @property
    def seconds(self) -> list[float]:
        """Of each step, without those of the warm-up."""
        return [after - before for before, after in pairwise(self._ends[WARMUP_STEPS - 1 :])]

    def on_step_end(
        self, args: HFTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        self._ends.append(time.perf_counter())


WARMUP_STEPS = 2


def main() -> None:
    """Print the time of a step and its ratio, a line for each of MODES."""
    (arguments,) = OneLineParser(BenchArguments).parse()
    try:
        _check(arguments)
        settings = parse_settings(arguments.settings)
    except ValueError as error:
        sys.exit(str(error))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, accelerators: {torch.cuda.device_count()}")
    for name in arguments.benchmarks:
        _compare(name, arguments, settings)


def _check(arguments: BenchArguments) -> None:
    unknown = sorted(set(arguments.benchmarks) - set(BENCHMARKS))
    if unknown:
        raise ValueError(f"unknown benchmarks: {', '.join(unknown)}; accepted: {', '.join(BENCHMARKS)}")
    if not (arguments.steps >= 1 and arguments.rounds >= 1):
        raise ValueError(f"--steps and --rounds must be at least 1, got {arguments.steps} and {arguments.rounds}")


def _compare(name: str, arguments: BenchArguments, settings: Mapping[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run, training = parse_mapping(
            {
                **{"benchmark": name, "output_dir": folder, "disable_tqdm": True, "log_level": "error"},
                **{"eval_strategy": "no", "logging_strategy": "no", "log_hardness": False},
                **settings,
                "max_steps": arguments.steps + WARMUP_STEPS,
            }
        )
        benchmark = BENCHMARKS[name]
        data = benchmark.load(data_options(run), model_options(run)).to(training.device)
        training.dataloader_pin_memory = False
        training.require_lambda_gelu = run.activation in GATES
        print(f"{name}: batch {training.per_device_train_batch_size * training.gradient_accumulation_steps}")
        _print_overhead(benchmark, run, training, data, arguments.rounds)


class _Mode(NamedTuple):
    trainer: type[Trainer]
    activation: str
    options: Mapping[str, Any]


_HARDENING = {"log_hardness": True, "harden": True, "switch_fraction": 0.0}
MODES = {
    "transformers' Trainer, gelu": _Mode(Trainer, "gelu", {}),
    "the same again": _Mode(Trainer, "gelu", {}),
    "LambdaGELUTrainer, gelu": _Mode(LambdaGELUTrainer, "gelu", {"require_lambda_gelu": False}),
    "λ-GELU, learning": _Mode(LambdaGELUTrainer, "lambda_gelu", {"log_hardness": True}),
    "λ-GELU, hardening by epoch": _Mode(LambdaGELUTrainer, "lambda_gelu", _HARDENING),
    "λ-GELU, hardening by step": _Mode(LambdaGELUTrainer, "lambda_gelu", {**_HARDENING, "hardening_strategy": "steps"}),
}
"""What is compared; the first is the denominator, and the second shows how far to trust a ratio."""


def _print_overhead(
    benchmark: Benchmark, run: RunArguments, training: LambdaGELUTrainingArguments, data: BenchmarkData, rounds: int
) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in MODES}
    for _ in range(rounds):
        for name, mode in MODES.items():
            arguments = copy.copy(training)
            for option, value in mode.options.items():
                setattr(arguments, option, value)
            trainer = new_trainer(benchmark, run, arguments, data, mode.trainer, mode.activation)
            seconds[name].append(statistics.median(step_seconds(trainer)))
    base = next(iter(seconds.values()))
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(values, base, strict=True)]
        print(
            f"  {name:<28} {1000 * statistics.median(values):8.2f} ms a step, ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


def new_trainer(
    benchmark: Benchmark,
    run: RunArguments,
    training: LambdaGELUTrainingArguments,
    data: BenchmarkData,
    kind: type[Trainer] = LambdaGELUTrainer,
    activation: str | None = None,
) -> Trainer:
    """Of a run's network and optimizer, with another `activation` where one is given."""
    torch.manual_seed(0)
    if activation is not None:
        granularity = run.granularity if activation in GATES else "layer"
        run = replace(run, activation=activation, granularity=granularity)
    trainer = kind(
        model=build_model(run, benchmark, data, model_options(run)),
        args=training,
        train_dataset=data.train,
        data_collator=benchmark.collate,
        optimizer_cls_and_kwargs=timm_optimizer(run, training),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def step_seconds(trainer: Trainer) -> list[float]:
    """Train, and time the steps."""
    clock = _Clock()
    trainer.add_callback(clock)
    trainer.train()
    return clock.seconds


if __name__ == "__main__":
    main()
