"""On which side sequences of different lengths are padded: where that changes nothing of what the network computes."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_lgelu.models.example_run import NOT_TAKEN, run_example
from hf_lgelu.models.task_outputs import task_outputs
from hf_lgelu.refit.batches import Batch
from hf_lgelu.refit.processes import each_has
from hf_lgelu.refit.units import Units

_MOST_CHANGE = 0.1
"""Of a sequence's outputs by padding, relative to them. Rounding in bfloat16 makes 0.01, a position that is not the
right one about 1."""

_TRIED = 2  # of the shortest sequences of each process


def settle_side(units: Units, model: nn.Module, outputs: Sequence[str] | None = None) -> Units:
    """The units, padded on the side on which they were given with padding, or where the model bears none there, on the
    other.

    A classifier that takes the last position needs padding in front; one that numbers positions from the first, behind.

    Args:
        units: of all processes, each of which must call.
        model: the original.
        outputs: names of the outputs that count.

    Raises ValueError where a sequence has other outputs with padding on either side.
    """
    whole = units.longest(range(len(units.keys)))
    others = frozenset() if units.left else frozenset(whole)
    changes = []
    for side in (units.left, others):
        there = replace(units, left=side)
        changes.append(max(each_has(_largest_change(there, model, outputs, whole))))
        if changes[-1] <= _MOST_CHANGE:
            return there
    behind, before = changes if not units.left else reversed(changes)
    raise ValueError(
        f"{type(model).__name__} gives something else for a sequence that is padded to {max(whole.values())}, the "
        f"longest of the data: outputs change by {behind:.2g} of their size with padding behind it, by {before:.2g} "
        "with padding before it, though an attention mask hides the padding. Give sequences of one length, padded as "
        "they are where the model is used"
    )


def _largest_change(units: Units, model: nn.Module, outputs: Sequence[str] | None, whole: dict[str, int]) -> float:
    """Of what the model gives for the shortest sequences that this process has; 0 where all are as long."""
    own = [number for number, key in enumerate(units.keys) if key in units.places]
    own.sort(key=lambda number: sum(units.lengths[number].values()))
    short = [number for number in own[:_TRIED] if units.lengths[number] != whole]
    changes = [
        _change(model, units.take([number], units.longest([number])), units.take([number], whole), outputs)
        for number in short
    ]
    return max(changes, default=0.0)


def _change(model: nn.Module, given: Batch, padded: Batch, outputs: Sequence[str] | None) -> float:
    try:
        first, second = (task_outputs(run_example(model, batch.inputs), outputs) for batch in (given, padded))
    except NOT_TAKEN:
        return 0.0  # what the model does not take is told where all of it is
    changes = [0.0]
    for name in first.keys() & second.keys():
        wanted, found = (_counted(batch, of[name], name) for batch, of in ((given, first), (padded, second)))
        if wanted.shape == found.shape:  # else rows are no tokens, or frames, of which padding may make one more
            finite = wanted.isfinite() & found.isfinite()
            wanted, found = wanted[finite].double(), found[finite].double()
            changes.append(((found - wanted).norm() / wanted.norm().clamp(min=torch.finfo(torch.float64).tiny)).item())
    return max(changes)


def _counted(batch: Batch, output: Tensor, name: str) -> Tensor:
    counted = batch.counted(output, name)
    return output if counted is None else output[counted]
