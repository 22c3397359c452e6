"""What each of two processes plans, converts and distills for test_convert_processes.py, all in one launch."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from refit_nets import BY_NAME
from small_networks import convert_with
from torch import Tensor

from hf_lgelu import ConversionRefusedError, convert_to_relu
from hf_lgelu.networks.batches import Batch, read_batches
from hf_lgelu.refit.distill import Together
from hf_lgelu.refit.folds import Folds, deal_folds

# Plans

FEATURES = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
CHUNK_SIZE = 8
PLANS = ("all hold all", "apart", "overlapping", "sequences")
REFUSED_PLANS = ("too few", "of two dtypes", "one has none")


def sequences(start: int, stop: int) -> Batch:
    """Sequences of `start` to `stop - 1` tokens, padded to the longest."""
    ids = torch.zeros(stop - start, stop - 1, dtype=torch.long)
    for row, length in enumerate(range(start, stop)):
        ids[row, :length] = length
    return Batch({"input_ids": ids, "attention_mask": (ids > 0).long()}, labels=ids)


def samples_given(case: str, process: int) -> list[Batch]:
    """What one of two processes holds."""
    if case == "all hold all":
        order = torch.randperm(200, generator=torch.Generator().manual_seed(process))
        return [Batch(part) for part in FEATURES[order].split(33 + process)] + [Batch(FEATURES[:5])] * process
    if case == "apart":
        return [Batch(FEATURES[process::2])]
    if case == "overlapping":
        return [Batch(FEATURES[:120] if process == 0 else FEATURES[80:])]
    if case == "one has none":
        return [Batch(FEATURES)] if process else []
    if case == "sequences":
        return [sequences(2, 12) if process == 0 else sequences(12, 21)]
    if case == "too few":
        return [Batch(FEATURES[:9] if process == 0 else FEATURES[5:13])]
    return [Batch(FEATURES[:20] if process == 0 else FEATURES[:20].double())]


def described(plan: Folds) -> dict:
    """All of a plan as JSON: the batches with their inputs and labels, fold by fold, the held-out part last."""
    parts = [
        [
            {"seeds": batch.seeds, "inputs": _listed(batch.load().inputs), "labels": _listed(batch.load().labels)}
            for batch in part
        ]
        for part in (*plan.folds, plan.held_out)
    ]
    counts = (plan.samples.given, len(plan.samples.keys), plan.rows, plan.held_out_samples)
    return json.loads(json.dumps({"parts": parts, "counts": counts}))


def _listed(value: Tensor | dict | None) -> list | dict | None:
    if isinstance(value, dict):
        return {name: entry.tolist() for name, entry in value.items()}
    return None if value is None else value.tolist()


def plans(state: PartialState) -> dict:
    found: dict = {}
    for case in PLANS:
        plan = deal_folds(samples_given(case, state.process_index), batch_size=CHUNK_SIZE)
        found[case] = described(plan)
    for case in REFUSED_PLANS:
        try:
            deal_folds(samples_given(case, state.process_index))
        except ValueError as error:
            found[case] = str(error)
    return found


# Conversions

WAYS = ("each has all", "each has a share")
CONVERSION = ("downsampling", "each has a share")


def given(name: str, way: str, process: int) -> list[Tensor]:
    """What one of two processes has."""
    inputs = BY_NAME[name].inputs()
    if way == "each has all":
        return list(inputs.split(13))
    return [inputs[process::2], inputs[:5]]


def converted(calibration: list[Tensor]) -> tuple[dict, dict]:
    """(weights, report) of one conversion."""
    net = BY_NAME[CONVERSION[0]]
    second = net.inputs(seed=9, units=50)
    model, report = convert_with(net.model(), calibration, batch_size=4, evaluation_data=second)
    return model.state_dict(), without_times(report.as_dict())


def without_times(found: Any) -> Any:
    """A report's values but the wall times in it, and what follows from them, which no two conversions share."""
    if isinstance(found, dict):
        return {key: without_times(value) for key, value in found.items() if key not in ("seconds", "next_step")}
    return type(found)(map(without_times, found)) if isinstance(found, list | tuple) else found


def refused(process: int) -> str:
    """What is said where only the second process has a row that is not finite."""
    net = BY_NAME["mlp"]
    inputs = net.inputs()[process::2]
    if process:
        inputs[20:] = float("inf")
    try:
        convert_to_relu(net.model(), inputs)
    except ConversionRefusedError as error:
        return str(error)
    return ""


# Steps of Adam


def held(way: str, state: PartialState | None) -> list[Tensor]:
    """What one of two processes has, or, without `state`, one that has what both have."""
    processes = (0, 1) if state is None else (state.process_index,)
    return [part for process in processes for part in given("mlp", way, process)]


def planned(way: str, state: PartialState | None) -> Folds:
    return deal_folds(read_batches(held(way, state)), batch_size=5)


def shares(way: str, state: PartialState | None) -> list[tuple[int, ...]]:
    """Which samples of each batch a process runs."""
    folds = planned(way, state)
    parts = [Together.of(batch, folds) for batch in folds.together]
    return [part.part.numbers if part.weight else () for part in parts]


def climbed(state: PartialState | None) -> list[tuple[dict, dict]]:
    """(weights, report) by all rungs: each has a share, or each has all and the first runs all that is held out."""
    net, options = BY_NAME["mlp"], {"batch_size": 5, "effort": "distill", "distill_steps": 16, "max_kl": None}
    data = held("each has a share", state), net.inputs(units=256)
    found = (convert_with(net.model(), each, **options) for each in data)
    return [(model.state_dict(), without_times(report.as_dict())) for model, report in found]


def main(folder: Path) -> None:
    """Everything, in the same order on both, into `folder`."""
    state = PartialState(cpu=True)
    if state.num_processes != 2 or state.distributed_type != DistributedType.MULTI_CPU:
        raise RuntimeError(f"two processes with gloo expected, got {state}")
    process = state.process_index
    found: dict = {"plans": plans(state), "converted": converted(given(*CONVERSION, process))}
    found |= {"refused": refused(process), "climbed": climbed(state)}
    found |= {("shares", way): shares(way, state) for way in WAYS}
    torch.save(found, folder / f"{process}.pt")
    state.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
