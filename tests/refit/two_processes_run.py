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
from hf_lgelu.refit.folds import Folds, deal_folds
from hf_lgelu.refit.samples import read_samples

# Plans

FEATURES = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
CHUNK_SIZE = 8
PLANS = ("rows", "sequences")
REFUSED_PLANS = ("too few", "of two dtypes", "one has none", "shares")


def sequences(start: int, stop: int) -> Batch:
    """Sequences of `start` to `stop - 1` tokens, padded to the longest."""
    ids = torch.zeros(stop - start, stop - 1, dtype=torch.long)
    for row, length in enumerate(range(start, stop)):
        ids[row, :length] = length
    return Batch({"input_ids": ids, "attention_mask": (ids > 0).long()}, labels=ids)


def samples_given(case: str, process: int) -> list[Batch]:
    """What one of two processes is given: the same, in another order and in other batches, or what is refused."""
    if case == "rows":
        order = torch.randperm(200, generator=torch.Generator().manual_seed(process))
        return [Batch(part) for part in FEATURES[order].split(33 + process)] + [Batch(FEATURES[:5])]
    if case == "shares":
        return [Batch(FEATURES[process::2])]
    if case == "one has none":
        return [Batch(FEATURES)] if process else []
    if case == "sequences":
        parts = [sequences(2, 12), sequences(12, 21)]
        return parts[::-1] if process else parts
    if case == "too few":
        return [Batch(FEATURES[:13]), Batch(FEATURES[:4])]
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
        plan = deal_folds(read_samples(samples_given(case, state.process_index)), batch_size=CHUNK_SIZE)
        found[case] = described(plan)
    for case in REFUSED_PLANS:
        try:
            deal_folds(read_samples(samples_given(case, state.process_index)))
        except ValueError as error:
            found[case] = str(error)
    return found


# Conversions

CONVERSION = "downsampling"


def converted() -> tuple[dict, dict]:
    """(weights, report) of one conversion."""
    net = BY_NAME[CONVERSION]
    second = net.inputs(seed=9, units=50)
    model, report = convert_with(net.model(), net.inputs(), batch_size=4, evaluation_data=second)
    return model.state_dict(), without_times(report.as_dict())


def without_times(found: Any) -> Any:
    """A report's values but the wall times in it, and what follows from them, which no two conversions share."""
    if isinstance(found, dict):
        return {key: without_times(value) for key, value in found.items() if key not in ("seconds", "next_step")}
    return type(found)(map(without_times, found)) if isinstance(found, list | tuple) else found


def refused() -> str:
    """What is said where one row of the data is not finite, which one process alone runs."""
    net = BY_NAME["mlp"]
    inputs = net.inputs()
    inputs[20] = float("inf")
    try:
        convert_to_relu(net.model(), inputs)
    except ConversionRefusedError as error:
        return str(error)
    return ""


# Steps of Adam


def shares() -> list[tuple[int, ...]]:
    """Which samples of each batch a process runs."""
    return [part.numbers if weight else () for part, weight in (batch.share() for batch in planned().fitted)]


def planned() -> Folds:
    return deal_folds(read_samples(read_batches(BY_NAME["mlp"].inputs())), batch_size=5)


def climbed() -> list[tuple[dict, dict]]:
    """(weights, report) by all rungs, on few samples and on many."""
    net, options = BY_NAME["mlp"], {"batch_size": 5, "effort": "distill", "distill_steps": 16, "max_kl": None}
    found = (convert_with(net.model(), each, **options) for each in (net.inputs(), net.inputs(units=256)))
    return [(model.state_dict(), without_times(report.as_dict())) for model, report in found]


def main(folder: Path) -> None:
    """Everything, in the same order on both, into `folder`."""
    state = PartialState(cpu=True)
    if state.num_processes != 2 or state.distributed_type != DistributedType.MULTI_CPU:
        raise RuntimeError(f"two processes with gloo expected, got {state}")
    process = state.process_index
    found = {
        "plans": plans(state), "converted": converted(), "refused": refused(), "climbed": climbed(), "shares": shares(),
    }  # fmt: skip
    torch.save(found, folder / f"{process}.pt")
    state.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
