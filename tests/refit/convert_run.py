"""A conversion by each of two processes for test_convert_processes.py, run by two_processes_run.py."""

from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from refit_nets import BY_NAME

from hf_lgelu import convert_to_relu
from hf_lgelu.refit.verdict import ConversionRefusedError

WAYS = ("each has all", "each has a share")
CASES = (*(("mlp", way) for way in WAYS), ("downsampling", "each has a share"))


def given(name: str, way: str, process: int) -> list[torch.Tensor]:
    """What one of two processes has."""
    inputs = BY_NAME[name].inputs()
    if way == "each has all":
        return list(inputs.split(13))
    return [inputs[process::2], inputs[:5]]


def converted(name: str, calibration: list[torch.Tensor]) -> tuple[dict, dict]:
    """(weights, report) of one conversion."""
    net = BY_NAME[name]
    second = net.inputs(seed=9, units=50)
    model, report = convert_to_relu(net.model(), calibration, batch_size=4, evaluation_data=second)
    return model.state_dict(), without_times(report.as_dict())


def without_times(found: Any) -> Any:
    """A report's values but the wall times in it, and what follows from them, which no two conversions share."""
    if isinstance(found, dict):
        return {key: without_times(value) for key, value in found.items() if key not in ("seconds", "next_step")}
    return type(found)(map(without_times, found)) if isinstance(found, list | tuple) else found


def refused() -> str:
    """What is said where only the second process has a row that is not finite."""
    net = BY_NAME["mlp"]
    inputs = net.inputs()[PartialState().process_index :: 2]
    if PartialState().process_index:
        inputs[20:] = float("inf")
    try:
        convert_to_relu(net.model(), inputs)
    except ConversionRefusedError as error:
        return str(error)
    return ""


def run(folder: Path, state: PartialState) -> None:
    """Convert everything, in the same order on both, into `folder`."""
    found = {}
    for name, way in CASES:
        found[name, way] = converted(name, given(name, way, state.process_index))
    found["refused"] = refused()
    torch.save(found, folder / f"{state.process_index}.pt")
