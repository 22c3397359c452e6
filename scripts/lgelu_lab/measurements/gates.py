"""What the study of gates needs beside its runs: its smooth network without training, and the time of a step."""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from hf_lgelu import ConversionConfig, ConversionRefusedError, LambdaGELUTrainer, convert_to_relu
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.conversion import change_of_outputs
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel, available_rows, draw_calibration, evaluate
from lgelu_lab.studies.arguments import model_options, parse_mapping, recorded_options, refuse_data_parallel
from lgelu_lab.studies.experiments import STUDIES
from lgelu_lab.studies.run import build_model

GATE_COLUMNS: dict[str, str] = {
    "model": "network: smooth, that of the study",
    "way": "converted (refitted without training), or step (a training step of a network of the study)",
    "activation": "of the step's network; null of the conversion",
    "granularity": "likewise",
    "score": "the benchmark's metric on the evaluation split, of the conversion",
    "max_logit_change": "largest difference from a logit of the smooth network's on the evaluation split, likewise",
    "step_seconds": "processor time of a training step, median over the rounds; null of the conversion",
    "step_ratio": "the same over the smooth network's in the same round, median",
    "refusal": "why there is no converted network; null where there is",
}


@dataclass(frozen=True)
class GateSettings:
    """How much is measured.

    Args:
        rows: calibration rows of the conversion, of text tokens.
        rounds: in each, every network makes `steps` steps, in turn.
        steps: likewise.
        bf16: score and compare under bfloat16 autocast, and take the steps so; None as the run of the smooth network.
    """

    rows: int = 8192
    rounds: int = 7
    steps: int = 3
    bf16: bool | None = None


def measure_gates(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: GateSettings
) -> list[dict[str, Any]]:
    """A row of the converted network, and one of a step of every different network of the study."""
    smooth = models["smooth"]
    rows = [{"way": "converted", **_converted(smooth, benchmark, data, settings)}]
    seconds: dict[tuple[str, str], list[float]] = {}
    steps = _steps(smooth, benchmark, data, bool(settings.bf16))
    for _ in range(settings.rounds):
        for network, step in steps.items():
            seconds.setdefault(network, []).append(_processor_seconds(step, settings.steps))
    first = next(iter(seconds.values()))
    for (activation, granularity), taken in seconds.items():
        rows.append(
            {
                **{"way": "step", "activation": activation, "granularity": granularity},
                "step_seconds": statistics.median(taken),
                "step_ratio": statistics.median(one / other for one, other in zip(taken, first, strict=True)),
            }
        )
    return [dict.fromkeys(GATE_COLUMNS) | {"model": "smooth"} | row for row in rows]


def _converted(
    smooth: TrainedModel, benchmark: Benchmark, data: BenchmarkData, settings: GateSettings
) -> dict[str, Any]:
    original = smooth.load()
    bf16 = bool(settings.bf16)
    calibration = draw_calibration(data, min(settings.rows, available_rows(data)), smooth.record.config["seed"])
    try:
        converted, _ = convert_to_relu(original, calibration, options=ConversionConfig(data_collator=benchmark.collate))
    except (ConversionRefusedError, ValueError) as refusal:  # a result of its own
        return {"refusal": str(refusal)}
    score = evaluate(converted, benchmark, data, bf16=bf16)[benchmark.metric]
    batches = DataLoader(data.eval, batch_size=64, collate_fn=benchmark.collate)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        change = change_of_outputs(original, converted.cpu(), batches)["max_logit_change"]
    return {"score": score, "max_logit_change": change}


def _steps(
    smooth: TrainedModel, benchmark: Benchmark, data: BenchmarkData, bf16: bool
) -> dict[tuple[str, str], Callable]:
    """{(activation, granularity): a training step} of the study's networks, the smooth one first."""
    config, found = smooth.record.config, {}
    options = {name: value for name, value in asdict(recorded_options(config)[1]).items() if value is not None}
    for experiment in STUDIES["gates"].build((benchmark.name,), (config["seed"],)):
        network = experiment.arguments["activation"], experiment.arguments.get("granularity", "layer")
        if network not in found:
            size = {"per_device_train_batch_size": config["train_batch_size"], "bf16": bf16}
            found[network] = _step({**experiment.arguments, **options, **size}, benchmark, data)
    return found


def _step(arguments: Mapping[str, Any], benchmark: Benchmark, data: BenchmarkData) -> Callable[[], None]:
    """Forward, backward and the optimizer's step on one batch, from the weights that a run starts with."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"disable_tqdm": True, "eval_strategy": "no", "harden": False, "relufication": False}
        quiet["use_cpu"] = not torch.accelerator.is_available()  # bf16 must be told so
        run, training = parse_mapping({**arguments, "output_dir": folder, **quiet})
        refuse_data_parallel(training)
        training.require_lambda_gelu = False
        torch.manual_seed(training.seed)
        model = build_model(run, benchmark, data, model_options(run))
        trainer = LambdaGELUTrainer(model, training, train_dataset=data.train, **benchmark.trainer_options(data))
        optimizer, batch = trainer.create_optimizer(), next(iter(trainer.get_train_dataloader()))
    model = trainer.model.train()

    def step() -> None:
        with torch.autocast(training.device.type, torch.bfloat16, enabled=training.bf16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first one makes the optimizer's state
    return step


def _processor_seconds(step: Callable[[], None], steps: int) -> float:
    """Of this process, which another one beside it changes less than the time on the wall."""
    started = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - started) / steps


GATE_OPTIONS = Measurement(
    name="gates",
    benchmarks=STUDIES["gates"].benchmarks,
    models=("smooth",),
    settings=GateSettings,
    measure=measure_gates,
    of_run=("bf16",),
)
