"""What each of two processes plans for the tests of plans and of conversions, run by two_processes_run.py."""

import json
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor

from hf_lgelu.refit.batches import Batch
from hf_lgelu.refit.folds import Folds, deal_folds

FEATURES = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
CHUNK_SIZE = 8


def sequences(start: int, stop: int) -> Batch:
    """Sequences of `start` to `stop - 1` tokens, padded to the longest."""
    ids = torch.zeros(stop - start, stop - 1, dtype=torch.long)
    for row, length in enumerate(range(start, stop)):
        ids[row, :length] = length
    return Batch({"input_ids": ids, "attention_mask": (ids > 0).long()}, labels=ids)


def given(case: str, process: int) -> list[Batch]:
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


CASES = ("all hold all", "apart", "overlapping", "sequences")
REFUSED = ("too few", "of two dtypes", "one has none")


def described(plan: Folds) -> dict:
    """All of a plan as JSON: the batches with their inputs and labels, fold by fold, the held-out part last."""
    parts = [
        [
            {"seeds": batch.seeds, "inputs": _listed(batch.load().inputs), "labels": _listed(batch.load().labels)}
            for batch in part
        ]
        for part in (*plan.folds, plan.held_out)
    ]
    counts = (plan.units.given, len(plan.units.keys), plan.rows, plan.held_out_units, plan.held_out_rows)
    return json.loads(json.dumps({"parts": parts, "counts": counts}))


def _listed(value: Tensor | dict | None) -> list | dict | None:
    if isinstance(value, dict):
        return {name: entry.tolist() for name, entry in value.items()}
    return None if value is None else value.tolist()


def run(folder: Path, state: PartialState) -> None:
    """Plan everything, in the same order on both, into `folder`."""
    report: dict = {}
    for case in CASES:
        plan = deal_folds(given(case, state.process_index), batch_size=CHUNK_SIZE, state=state)
        report[case] = described(plan)
    for case in REFUSED:
        try:
            deal_folds(given(case, state.process_index), state=state)
        except ValueError as error:
            report[case] = str(error)
    (folder / f"{state.process_index}.json").write_text(json.dumps(report), encoding="utf-8")
