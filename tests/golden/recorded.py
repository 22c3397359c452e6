"""What the golden test holds: conversions, trainings, ONNX graphs and refusals, as plain values.

python tests/golden/recorded.py     # from the root: writes golden.json anew
"""

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from networks import convert_with
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_lgelu
from hf_lgelu.refit.verdict import ConversionRefusedError

sys.path.append(str(Path(__file__).parents[1]))
from networks import NETWORKS

FILE = Path(__file__).with_name("golden.json")
IN_TWO_PROCESSES = ("mlp", "bert padded left")
EXPORTED = ("mlp", "bert padded right", "resnet")
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "place": ("llama", {"effort": "place"}),
    "wider": ("llama", {"width": 1.5}),
    "distill": ("llama", {"effort": "distill", "distill_steps": 4}),
    "relu6": ("mlp", {"target": "relu6"}),
    "one gate kept": ("mlp", {"keep": 1}),
}
_OF_THE_CLOCK = {"seconds", "next_step"}
_GOING = {"config", "returns", "zeros", "zeros_wanted"}  # fields that the report loses


def projections(model: nn.Module) -> dict[str, float]:
    """Each floating tensor of a model as its product with a fixed wave: another tensor gives another number."""
    state = {name: value.double().flatten() for name, value in model.state_dict().items() if value.is_floating_point()}
    return {name: float(value @ torch.arange(len(value)).double().cos()) for name, value in state.items()}


def without_times(found: Any) -> Any:
    """A report's values without wall times and without the fields that go."""
    if isinstance(found, dict):
        return {key: without_times(value) for key, value in found.items() if key not in _OF_THE_CLOCK | _GOING}
    return list(map(without_times, found)) if isinstance(found, list | tuple) else found


def conversion(name: str, **options: Any) -> dict[str, Any]:
    """Weights and report of one network."""
    network = NETWORKS[name]
    inputs = network.inputs()
    state = PartialState(cpu=True)
    if state.num_processes > 1:
        share = slice(state.process_index, None, state.num_processes)
        inputs = {k: v[share] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[share]
    model, report = convert_with(network.model(), inputs, **options)
    return {"weights": projections(model), "report": without_times(report.as_dict())}


class _Curve(TrainerCallback):
    """λ of each layer at the end of each epoch."""

    def __init__(self) -> None:
        self.epochs: list[list[float]] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.epochs.append(list(hf_lgelu.hardness_profile(model).values()))


def training(name: str) -> list[list[float]]:
    """λ over eight epochs: learned, hardened by the paper's schedule, or hardened step by step in a plain Trainer."""
    torch.manual_seed(0)
    model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=6, hidden_size=12, num_hidden_layers=3))
    drawn = torch.Generator().manual_seed(1)
    features = torch.randn(96, 6, generator=drawn)
    rows = [{"features": row, "labels": int(row[:2].prod() > 0)} for row in features]
    options: dict[str, Any] = {
        "num_train_epochs": 8, "per_device_train_batch_size": 16, "learning_rate": 0.05, "optim": "sgd",
        "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no",
    }  # fmt: skip
    curve = _Curve()
    with tempfile.TemporaryDirectory() as folder:
        if name == "plain trainer":
            config = hf_lgelu.HardeningConfig(40.0, hardening_schedule="geometric", hardening_strategy="steps")
            callback = hf_lgelu.HardeningCallback(config)
            optimizer = torch.optim.SGD(hf_lgelu.hardness_parameter_groups(model, learning_rate=0.05), lr=0.05)
            Trainer(
                model, TrainingArguments(folder, **options), train_dataset=rows, callbacks=[callback, curve],
                optimizers=(optimizer, None),
            ).train()  # fmt: skip
        else:
            arguments = hf_lgelu.LambdaGELUTrainingArguments(folder, harden=name == "hardened", **options)
            hf_lgelu.LambdaGELUTrainer(
                model=model, args=arguments, train_dataset=rows, callbacks=[curve], eval_dataset=rows[:16]
            ).train()
    return curve.epochs


def graph(name: str) -> list[str]:
    """The operations of a network's ReLU form, in the order of the ONNX file."""
    import onnx

    network = NETWORKS[name]
    model = network.model().float()
    hf_lgelu.substitute_relu(model, kinds=("gelu", "silu"))
    inputs = network.inputs(4)
    inputs = inputs.float() if isinstance(inputs, Tensor) else {
        key: value.float() if value.is_floating_point() else value for key, value in inputs.items()
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        hf_lgelu.export_onnx(model, Path(folder, "x.onnx"), inputs)
        return [node.op_type for node in onnx.load(Path(folder, "x.onnx")).graph.node]


def refusal(call: Callable[[], Any]) -> dict[str, str]:
    """The class and the text of what a call raises."""
    try:
        call()
    except (ValueError, TypeError, RuntimeError, OSError, ConversionRefusedError) as error:
        return {"class": type(error).__name__, "text": re.sub(r"/\S*/tmp\w+|/tmp/\w+", "FOLDER", str(error))}
    return {"class": "", "text": "nothing was raised"}


def recorded() -> dict[str, Any]:
    """Everything, of one process."""
    from refusals import REFUSALS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "conversions": {name: conversion(name) for name in NETWORKS},
            "options": {name: conversion(network, **options) for name, (network, options) in OPTIONS.items()},
            "trainings": {name: training(name) for name in ("learned", "hardened", "plain trainer")},
            "graphs": {name: graph(name) for name in EXPORTED},
            "refusals": {name: refusal(call) for name, call in REFUSALS.items()},
        }


def two_processes(folder: Path) -> None:
    """What each of two processes finds, into `folder`."""
    state = PartialState(cpu=True)
    found = {name: conversion(name) for name in IN_TWO_PROCESSES}
    Path(folder, f"{state.process_index}.json").write_text(json.dumps(found), encoding="utf-8")
    state.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:  # one of two processes
        two_processes(Path(sys.argv[1]))
    else:
        from two_processes import run_in_two_processes

        found = recorded()
        with tempfile.TemporaryDirectory() as folder:
            run_in_two_processes(Path(__file__), Path(folder))
            found["two processes"] = json.loads(Path(folder, "0.json").read_text(encoding="utf-8"))
        FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
