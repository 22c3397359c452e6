"""How sequences are padded: where, and how far, it changes nothing of what the network computes."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from accelerate import PartialState
from torch import Tensor, nn

from hf_lgelu.models.example_run import NOT_TAKEN, structure_kept
from hf_lgelu.models.outputs import are_class_scores
from hf_lgelu.refit.batches import Batch
from hf_lgelu.refit.compare import compared_outputs
from hf_lgelu.refit.processes import each_has
from hf_lgelu.refit.samples import Samples

_MOST_CHANGE = 0.1
"""Of outputs by padding, relative to how far they are spread. Rounding in bfloat16 makes 0.01, a position that is not
the right one about 1."""

_MOST_CHANGE_OF_CROPPED = 0.02
"""Less, since padding that was given can stay at no cost but time."""

_TRIED = 8  # of the shortest sequences of each process

Outputs = dict[str, list[Tensor]]
"""By name, of one sequence after the other, (rows, columns) in float64, without padding."""


def settle_padding(
    samples: Samples, model: nn.Module, outputs: Sequence[str] | None = None, state: PartialState | None = None
) -> Samples:
    """The samples, padded on the side on which they were given with padding, or where the model bears none there, on
    the other; without what they were given of it, where that changes nothing.

    A classifier that takes the last position needs padding in front; one that numbers positions from the first, behind.

    Args:
        samples: of all processes.
        model: the original.
        outputs: names of the outputs that count.
        state: the processes, each of which must call; None for this one alone.

    Raises ValueError where a sequence has other outputs with padding on either side.
    """
    whole = samples.longest(range(len(samples.keys)))
    changes = {}
    for side in (samples.left, frozenset() if samples.left else frozenset(whole)):
        there = replace(samples, left=side)
        changes[side] = _of_all(_largest_change(model, outputs, _padded_more(there, whole)), state)
        if changes[side] <= _MOST_CHANGE:
            without = there.cropped()
            change = _of_all(_largest_change(model, outputs, _cropped(there, without), must_compare=True), state)
            return without if change <= _MOST_CHANGE_OF_CROPPED else there
    behind = changes.pop(frozenset())
    (in_front,) = changes.values()
    raise ValueError(
        f"{type(model).__name__} gives something else for a sequence that is padded to {max(whole.values())}, the "
        f"longest of the data: outputs change by {behind:.2g} of their spread with padding behind it, by "
        f"{in_front:.2g} with padding in front, though an attention mask hides the padding. Give sequences of one "
        "length, padded as they are where the model is used"
    )


def _of_all(change: float, state: PartialState | None) -> float:
    return change if state is None else max(each_has(change))


def _tried(samples: Samples) -> list[int]:
    """The shortest that this process has."""
    return samples.short_first(number for number, key in enumerate(samples.keys) if key in samples.places)[:_TRIED]


def _padded_more(samples: Samples, whole: dict[str, int]) -> Iterator[tuple[Batch, Batch]]:
    """Some of the shortest sequences as they were given, and padded to the longest."""
    for number in _tried(samples):
        if samples.lengths[number] != whole:
            yield _alone(samples, number), samples.take([number], whole)


def _cropped(samples: Samples, without: Samples) -> Iterator[tuple[Batch, Batch]]:
    """Some of the shortest sequences as they were given, and without that padding, alone and among longer ones."""
    order = without.short_first(range(len(without.keys)))
    middle, whole = without.longest(order[: len(order) // 2 + 1]), without.longest(order)
    for number in _tried(without):
        if samples.lengths[number] != without.lengths[number]:
            given = _alone(samples, number)
            yield given, _alone(without, number)
            own = without.lengths[number]
            longer = (wider for wider in (middle, whole) if all(wider[name] >= own[name] for name in own))
            yield from ((given, without.take([number], lengths)) for lengths in longer)


def _alone(samples: Samples, number: int) -> Batch:
    return samples.take([number], samples.longest([number]))


def _largest_change(
    model: nn.Module,
    outputs: Sequence[str] | None,
    pairs: Iterable[tuple[Batch, Batch]],
    *,
    must_compare: bool = False,
) -> float:
    """Of what the model gives for the second of each pair, which is the first padded otherwise; 0 of no pairs.

    What cannot be compared, or makes another network of the model, is no change unless it `must_compare`: then all of
    it.
    """
    given: Outputs = defaultdict(list)
    other: Outputs = defaultdict(list)
    for first, second in pairs:
        with structure_kept(model) as is_another:
            try:
                _run(model, first, outputs, given)
            except NOT_TAKEN:
                return 0.0  # what the model does not take is told where all of it is
            try:
                _run(model, second, outputs, other)
            except NOT_TAKEN:
                return math.inf
            if must_compare and is_another():
                return math.inf
    return max((_change(given[name], other[name], must_compare) for name in given), default=0.0)


def _run(model: nn.Module, batch: Batch, outputs: Sequence[str] | None, into: Outputs) -> None:
    for name, output in compared_outputs(model, batch.inputs, outputs).tensors.items():
        rows = batch.without_padding(output, name, -1).double()
        # A number that is added to all classes changes nothing, and may be larger than all that does.
        is_centred = are_class_scores(name) and rows.shape[-1] > 1
        into[name].append(rows - rows.mean(-1, keepdim=True) if is_centred else rows)


def _change(given: list[Tensor], other: list[Tensor], must_compare: bool) -> float:
    """‖other − given‖ / ‖given − its mean‖ over the rows of all; of a single row its own norm."""
    # Of a sound padding may make a frame more; rows that are no tokens at all cannot be compared.
    pairs = [
        (first[: len(second)], second[: len(first)])
        for first, second in zip(given, other, strict=True)
        if abs(len(first) - len(second)) <= 1 and first.shape[1:] == second.shape[1:]
    ]
    if must_compare and len(pairs) < len(given):
        return math.inf
    if not pairs:
        return 0.0
    wanted, found = (torch.cat(rows) for rows in zip(*pairs, strict=True))
    known = wanted.isfinite()
    if not bool((found.isfinite() | ~known).all()):
        return math.inf
    wanted, found = wanted.masked_fill(~known, 0.0), found.masked_fill(~known, 0.0)
    spread = wanted - wanted.mean(0) if len(wanted) > 1 else wanted
    return ((found - wanted).norm() / spread.norm().clamp(min=torch.finfo(torch.float64).tiny)).item()
