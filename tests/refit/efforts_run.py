"""Steps of Adam that each of two processes takes for test_convert_processes.py, run by two_processes_run.py."""

import copy
from pathlib import Path

import torch
from accelerate import PartialState
from convert_run import WAYS, given, without_times
from refit_nets import BY_NAME
from torch import nn

from hf_lgelu import convert_to_relu
from hf_lgelu.refit.batches import Batch, read_batches
from hf_lgelu.refit.distill import distill, output_loss
from hf_lgelu.refit.folds import Folds, deal_folds


def networks() -> tuple[nn.Module, nn.Module]:
    """(the original, a network of the same shape with ReLU that is off)."""
    original = BY_NAME["mlp"].model()
    converted = copy.deepcopy(original)
    converted[1], converted[3] = nn.ReLU(), nn.ReLU()
    return original, converted


def planned(way: str, state: PartialState | None) -> Folds:
    """The folds of what one of two processes has, or, without `state`, one that has what both have."""
    processes = (0, 1) if state is None else (state.process_index,)
    inputs = [part for process in processes for part in given("mlp", way, process)]
    return deal_folds(read_batches(inputs), batch_size=5, state=state)


def distilled(way: str, state: PartialState | None) -> dict:
    """The weights after 16 steps."""
    original, converted = networks()
    distill(
        original, converted, planned(way, state), names=[name for name, _ in converted.named_parameters()], steps=16
    )
    return converted.state_dict()


def shares(way: str, state: PartialState | None) -> list[tuple[int, ...]]:
    """Which units of each batch a process runs."""
    batches = [batch.share() for batch in planned(way, state).together]
    return [() if batch is None else batch.numbers for batch in batches]


class Columns(nn.Module):
    """Outputs that are no class scores: the loss is relative to how much each column varies over all rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """x (B, 6)."""
        return {"pred_boxes": self.inner(x)}


def loss_part(process: int | None, columns: bool) -> float:
    """A process's part of the loss over 30 rows, of which the first has 20."""
    original, converted = (Columns(network) if columns else network for network in networks())
    rows = BY_NAME["mlp"].inputs()[:30]
    inputs = {None: rows, 0: rows[:20], 1: rows[20:]}[process]
    return output_loss(original, converted, Batch(inputs), None).item()


def weightless_part(process: int | None) -> float:
    """The same of 20 rows that the first has, where the second runs one that counts for nothing."""
    original, converted = networks()
    rows = BY_NAME["mlp"].inputs()
    inputs, weight = (rows[50:51], 0.0) if process == 1 else (rows[:20], 1.0)
    return output_loss(original, converted, Batch(inputs), None, weight).item()


def converted(state: PartialState | None) -> tuple[dict, dict]:
    """(weights, report) of a conversion with every rung, the last one of fewer steps."""
    processes = (0, 1) if state is None else (state.process_index,)
    inputs = [part for process in processes for part in given("mlp", "each has a share", process)]
    model, report = convert_to_relu(
        BY_NAME["mlp"].model(), inputs, batch_size=5, effort="distill", distill_steps=16, max_kl=None
    )
    return model.state_dict(), without_times(report.as_dict())


def run(folder: Path, state: PartialState) -> None:
    """Everything, in the same order on both, into `folder`."""
    process = state.process_index
    found: dict = {
        (name, way): make(way, state) for way in WAYS for name, make in (("shares", shares), ("distilled", distilled))
    }
    found["converted"] = converted(state)
    found["losses"] = [loss_part(process, False), loss_part(process, True), weightless_part(process)]
    torch.save(found, folder / f"efforts-{process}.pt")
