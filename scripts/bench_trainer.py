"""How fast a benchmark trains through LambdaGELUTrainer, against a bare loop on the same model and batch.

The bare loop runs forward, backward and the optimizer's step on one batch that it holds already, as often
a step as the gradients of batches are added up, so all that Trainer, its callbacks, the data and their
augmentation cost is in the ratio. Network and optimizer are those of a run with the same settings. Both are
timed in turn, without the first steps; the figures are medians over the rounds. With --overhead, also against
transformers' own Trainer on the same network with GELU: while λ is learned, and while it hardens.

    python scripts/bench_trainer.py --benchmarks mlp-digits resnet18-cifar10 gpt2-wikitext2
    python scripts/bench_trainer.py --benchmarks mlp-digits --overhead --rounds 5
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
    overhead: bool = field(
        default=False, metadata={"help": "Compare with transformers' Trainer on the same network with GELU as well."}
    )
    settings: list[str] = field(
        default_factory=list, metadata={"help": "Arguments of scripts/train.py, e.g. bf16=true image_size=64."}
    )


class Steps(NamedTuple):
    """Of each optimizer step that was timed: the rows that the network was given for it, and the seconds it took."""

    rows: list[int]
    seconds: list[float]

    @property
    def rows_per_second(self) -> float:
        """Over all of them."""
        return sum(self.rows) / sum(self.seconds)


class _Clock(TrainerCallback):
    """When each optimizer step ended, and how many rows the network had been given by then."""

    def __init__(self, trainer: Trainer) -> None:
        self._device = trainer.args.device
        self._rows = 0
        self._ends: list[tuple[int, float]] = []
        trainer.model.register_forward_pre_hook(self._count, with_kwargs=True)

    @property
    def steps(self) -> Steps:
        """Without those of the warm-up; the last of an epoch may have fewer rows than the others."""
        pairs = list(pairwise(self._ends[WARMUP_STEPS - 1 :]))
        return Steps([b[0] - a[0] for a, b in pairs], [b[1] - a[1] for a, b in pairs])

    def _count(self, model: torch.nn.Module, positional: tuple[Any, ...], inputs: Mapping[str, Any]) -> None:
        self._rows += len(next(iter(inputs.values()))) if model.training else 0

    def on_step_end(
        self, args: HFTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._ends.append((self._rows, _now(self._device)))


WARMUP_STEPS = 2


def main() -> None:
    """Print samples/s of both and their ratio, a line a benchmark."""
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
        rates: dict[str, list[float]] = {"trainer": [], "bare": []}
        for _ in range(arguments.rounds):
            for kind, timed in (("trainer", trainer_steps), ("bare", bare_steps)):
                rates[kind].append(timed(new_trainer(benchmark, run, training, data)).rows_per_second)
        _print_rates(name, training.per_device_train_batch_size * training.gradient_accumulation_steps, rates)
        if arguments.overhead:
            _print_overhead(benchmark, run, training, data, arguments.rounds)


def _print_rates(name: str, batch_size: int, rates: Mapping[str, list[float]]) -> None:
    trainer, bare = (statistics.median(rates[kind]) for kind in ("trainer", "bare"))
    ratios = [a / b for a, b in zip(rates["trainer"], rates["bare"], strict=True)]
    print(
        f"{name}: batch {batch_size}, {trainer:.1f} samples/s through the Trainer, {bare:.1f} in a bare loop; "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


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
"""What --overhead compares; the first is the denominator, and the second shows how far to trust a ratio."""


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
            seconds[name].append(statistics.median(trainer_steps(trainer).seconds))
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


def trainer_steps(trainer: Trainer) -> Steps:
    """Train, and time the steps."""
    clock = _Clock(trainer)
    trainer.add_callback(clock)
    trainer.train()
    return clock.steps


def bare_steps(trainer: Trainer) -> Steps:
    """The same model, optimizer, accumulation of gradients and autocast, on one batch."""
    model, optimizer, args = trainer.model.train(), trainer.create_optimizer(), trainer.args
    batch, parts = next(iter(trainer.get_train_dataloader())), args.gradient_accumulation_steps
    seconds = []
    for _ in range(args.max_steps):
        started = _now(args.device)
        for _ in range(parts):
            with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
                loss = model(**batch).loss / parts
            loss.backward()
        if args.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(_now(args.device) - started)
    timed = seconds[WARMUP_STEPS:]
    return Steps([parts * len(next(iter(batch.values())))] * len(timed), timed)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main()
