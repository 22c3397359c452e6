"""The units of the data (rows, sequences, images), each counted once, and the folds that they are dealt into.

Units are known by what they contain, and come in the order of their digests, which is as good as a random one: so
the same inputs always make the same folds, whichever process holds them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch import Tensor

from hf_lgelu.refit.batches import BARE, IGNORED_LABEL, LABEL_KEYS, Batch
from hf_lgelu.refit.processes import each_has

FOLDS = 4
LEAST_ROWS = 16
"""Fewer distinct rows are refused."""

LEAST_ROWS_TO_HOLD_OUT = 64
MOST_HELD_OUT_UNITS = 1024
_HELD_OUT_SHARE = 1 / 8

_ROWS_AT_ONCE = 1024
_TOKENS_AT_ONCE = 2048
_IMAGES_AT_ONCE = 32
_LONGEST_FEATURE_ROW = 4096
"""A longer row of floats is a waveform, to be run as an image is."""

_WORTH_A_TRACE = 0.8
"""Share of the longest sequences up to which the shorter half is run as a shape of its own."""

_KEY_BYTES = 16
_LABELS = LABEL_KEYS[0]
"""The labels' name among the tensors of a unit; no input has it."""


def known_processes() -> PartialState:
    """The processes that share the work, of accelerate; on CPUs where its launcher was told so.

    accelerate reads ACCELERATE_USE_CPU in Accelerator alone; without it, processes on CPUs would not know of each
    other.
    """
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


_Padded = tuple[Sequence[int], Mapping[str, int] | None]
"""Numbers of units, and {name: length} to which they are padded; None for each batch to its own longest."""


@dataclass(frozen=True)
class Units:
    """The distinct units of all processes in the ascending order of their keys.

    Args:
        batches: what this process was given; nothing of it is copied until `take`.
        keys: blake2b digests of the units' inputs. Labels do not count, nor does padding where there is an attention
            mask.
        rows: how many rows each unit gives: tokens of a sequence, else 1.
        holders: the processes that have each unit.
        places: {key: (batch, row in it)} of the units that this process has.
        given: units given, duplicates among them.
        lengths: {name: length} of each unit's tensors that may be of different lengths, as they were given.
        at_once: the most units that are run together.
    """

    batches: Sequence[Batch]
    keys: Sequence[bytes]
    rows: Sequence[int]
    holders: Sequence[Sequence[int]]
    places: Mapping[bytes, tuple[int, int]]
    given: int
    lengths: Sequence[Mapping[str, int]]
    at_once: int

    def longest(self, numbers: Iterable[int]) -> dict[str, int]:
        """{name: length} to which the sequences of some units have to be padded."""
        found: dict[str, int] = {}
        for number in numbers:
            for name, length in self.lengths[number].items():
                found[name] = max(found.get(name, 0), length)
        return found

    def take(self, numbers: Sequence[int], lengths: Mapping[str, int]) -> Batch:
        """The units `numbers` of this process as one batch, sequences padded on the right to `lengths`."""
        by_batch: dict[int, tuple[list[int], list[int]]] = {}
        for position, number in enumerate(numbers):
            batch, row = self.places[self.keys[number]]
            positions, rows = by_batch.setdefault(batch, ([], []))
            positions.append(position)
            rows.append(row)
        sources = [(_named(self.batches[batch]), *where) for batch, where in by_batch.items()]
        taken = {name: _gather(name, sources, len(numbers), lengths.get(name)) for name in sources[0][0]}
        labels = taken.pop(_LABELS, None)
        inputs = self.batches[0].inputs
        return Batch(taken[BARE] if isinstance(inputs, Tensor) else inputs | taken, labels)


class _Own(NamedTuple):
    """What a process tells the others: units with their rows and lengths, and what is written of `Units`."""

    given: int
    structures: set[tuple[str, ...]]
    units: dict[bytes, tuple[int, Mapping[str, int]]]
    at_once: int


def read_units(batches: Iterable[Batch], state: PartialState | None = None) -> Units:
    """Every unit once; of several with the same key the one given first, with its labels.

    Units without a row (nothing but padding) are left out.

    Args:
        batches: of this process; read once and kept.
        state: the processes that share the work, each of which must call; None for this one alone.

    Raises ValueError where batches differ in names, dtypes, shapes or constants; tensors with the shape of the
    attention mask may differ in length.
    """
    batches = [batch for batch in batches if len(batch)]
    places: dict[bytes, tuple[int, int]] = {}
    found: dict[bytes, tuple[int, Mapping[str, int]]] = {}
    for number, batch in enumerate(batches):
        given = {name: value.shape[1] for name, value in _named(batch).items() if _may_be_padded(batch, name)}
        for row, (key, count) in enumerate(zip(unit_keys(batch), _row_counts(batch), strict=True)):
            if count and key not in places:
                places[key], found[key] = (number, row), (count, given)
    own = _Own(
        given=sum(map(len, batches)),
        structures={_structure(batch) for batch in batches},
        units=found,
        at_once=min(map(_units_at_once, batches), default=_ROWS_AT_ONCE),
    )
    parts = [own] if state is None else each_has(own)
    _require_alike(parts)
    # Of a unit that several processes have, with other padding, all of them must know the longest.
    everything: dict[bytes, tuple[int, Mapping[str, int]]] = {}
    for part in parts:
        for key, (count, lengths) in part.units.items():
            known = everything.get(key, (count, lengths))[1]
            everything[key] = count, {name: max(length, known[name]) for name, length in lengths.items()}
    keys = sorted(everything)
    return Units(
        batches=batches,
        keys=keys,
        rows=[everything[key][0] for key in keys],
        holders=[[process for process, part in enumerate(parts) if key in part.units] for key in keys],
        places=places,
        given=sum(part.given for part in parts),
        lengths=[everything[key][1] for key in keys],
        at_once=min(part.at_once for part in parts),
    )


def _require_alike(parts: Sequence[_Own]) -> None:
    empty = [process for process, part in enumerate(parts) if not part.units]
    if empty and len(empty) < len(parts):
        raise ValueError(f"process {empty[0]} was given no inputs; give every process all of them, or a share")
    structures = sorted(set().union(*(part.structures for part in parts)))
    if len(structures) > 1:
        first, second = (set(structure) for structure in structures[:2])
        raise ValueError(
            f"batches of the data differ: {'; '.join(sorted(first - second))} in one, "
            f"{'; '.join(sorted(second - first))} in another. All must have the same names, dtypes, shapes and "
            "constants. Only sequences may differ in length: tensors of the shape (B, T) of an attention_mask, which "
            "must then be given"
        )


@dataclass(frozen=True)
class FoldBatch:
    """Units of one fold, run through the model together; gathered from what was given at each `load`."""

    units: Units = field(repr=False)
    numbers: tuple[int, ...]
    lengths: Mapping[str, int] = field(default_factory=dict)

    def load(self) -> Batch:
        """Inputs and labels."""
        return self.units.take(self.numbers, self.lengths)

    @property
    def seeds(self) -> list[int]:
        """One 63-bit integer per unit, which depends on nothing but its content."""
        return [int.from_bytes(self.units.keys[number][:8], "big") >> 1 for number in self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def pieces(self, most: int) -> "Iterator[FoldBatch]":
        """The same units in as few batches as have at most so many of them, padded as the whole."""
        size = -(-len(self) // -(-len(self) // most))
        for start in range(0, len(self), size):
            yield FoldBatch(self.units, self.numbers[start : start + size], self.lengths)

    def share(self, process: int) -> "FoldBatch | None":
        """What one process has of a batch that all run together, padded as the whole; None where it has nothing of it.

        Of the units that several processes have each takes some.
        """
        holders = (self.units.holders[number] for number in self.numbers)
        owners = [held[position % len(held)] for position, held in enumerate(holders)]
        own = tuple(number for number, owner in zip(self.numbers, owners, strict=True) if owner == process)
        return FoldBatch(self.units, own, self.lengths) if own else None


@dataclass(frozen=True)
class Folds:
    """What is fitted on and what is not.

    Args:
        units: of all processes.
        folds: the batches of each fold that this process runs, possibly none; one fold without cross-validation.
        held_out: its batches of the part that nothing is fitted on; () under 64 rows.
        held_out_units: units of that part on all processes, with `held_out_rows` rows.
        together: the batches of all folds as one process that holds all would run them, whoever holds their units.
        held_out_together: those of the part held out.
    """

    units: Units
    folds: tuple[tuple[FoldBatch, ...], ...]
    held_out: tuple[FoldBatch, ...]
    held_out_units: int
    held_out_rows: int
    together: tuple[FoldBatch, ...]
    held_out_together: tuple[FoldBatch, ...]

    @property
    def rows(self) -> int:
        """Distinct rows of all processes, held out or not."""
        return sum(self.units.rows)

    @property
    def first(self) -> FoldBatch:
        """The first batch that this process fits on, or one unit that it has."""
        return next((batch for fold in self.folds for batch in fold), self.some_unit)

    @property
    def spread(self) -> tuple[FoldBatch, ...]:
        """Some batches of each fold of this process, of short sequences as of long ones.

        Of each as many units as a batch has by default, however many `batch_size` lets into one.
        """
        found: list[FoldBatch] = []
        for number, fold in enumerate(self.folds):
            count = min(len(fold), math.ceil(self.units.at_once / len(fold[0].numbers))) if fold else 0
            within = (2 * number + 1) / (2 * len(self.folds))  # so that the folds do not look at the same lengths
            found += (fold[int((place + within) * len(fold) / count)] for place in range(count))
        return tuple(found)

    @property
    def some_unit(self) -> FoldBatch:
        """One unit that this process has."""
        own = next(number for number, key in enumerate(self.units.keys) if key in self.units.places)
        return FoldBatch(self.units, (own,), self.units.longest([own]))


def deal_folds(batches: Iterable[Batch], *, batch_size: int | None = None, state: PartialState | None = None) -> Folds:
    """The distinct units in four folds and a part that is held out.

    Args:
        batches: of this process; read once and kept.
        batch_size: the most units run at once; by default 1,024 rows of features, 2,048 tokens, 32 images.
        state: the processes that share the work, each of which must call; None for this one alone.

    Raises ValueError for batches that do not go together, and for fewer than 16 distinct rows.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    units = read_units(batches, state)
    if not units.given:
        raise ValueError(
            "data holds no inputs; an iterator gives its batches once, so one that was read before is empty. Pass a "
            "dataset or a DataLoader"
        )
    if sum(units.rows) < LEAST_ROWS:
        raise ValueError(
            f"a refit needs at least {LEAST_ROWS} distinct rows (tokens of sequences, else units), got "
            f"{sum(units.rows)} in {len(units.keys)} distinct units of {units.given} given; give more inputs, at best "
            "several times the width of the widest layer"
        )
    held_out, folds, size = _deal(units.rows, batch_size or units.at_once)
    process = 0 if state is None else state.process_index
    parts, apart = list(_halves(units, folds, size)), [(_short_first(units, held_out), None)]
    return Folds(
        units,
        folds=tuple(tuple(_own_batches(units, halves, size, process)) for halves in parts),
        held_out=tuple(_own_batches(units, apart, size, process)),
        held_out_units=len(held_out),
        held_out_rows=sum(units.rows[number] for number in held_out),
        together=tuple(batch for halves in parts for batch in _own_batches(units, halves, size)),
        held_out_together=tuple(_own_batches(units, apart, size)),
    )


def cut_batches(batches: Iterable[Batch], batch_size: int | None = None) -> Iterator[Batch]:
    """The batches in pieces of at most `batch_size` units, by default those of `deal_folds`, as views."""
    for batch in batches:
        size = batch_size or _units_at_once(batch)
        for start in range(0, len(batch), size):
            yield batch[start : start + size]


def _deal(rows: Sequence[int], at_once: int) -> tuple[list[int], list[list[int]], int]:
    """Held-out units, folds of equal size and the size of their batches, from the rows of all units by key."""
    held_out = _hold_out(rows)
    apart = set(held_out)
    rest = [number for number in range(len(rows)) if number not in apart]
    if not held_out or len(rest) < FOLDS:
        return held_out, [rest], -(-len(rest) // -(-len(rest) // at_once))
    # Whole batches only: every distinct size of a batch costs a trace of the model. What is left over is held out.
    size = len(rest) // FOLDS
    together = size // -(-size // at_once)
    size -= size % together
    folds = [rest[size * fold : size * (fold + 1)] for fold in range(FOLDS)]
    return sorted(held_out + rest[size * FOLDS :]), folds, together


def _hold_out(rows: Sequence[int]) -> list[int]:
    """Units with an eighth of all rows, at least 16, spread over the units; [] where that leaves too little."""
    total = sum(rows)
    if total < LEAST_ROWS_TO_HOLD_OUT:
        return []
    share = min(max(LEAST_ROWS, total * _HELD_OUT_SHARE) / total, MOST_HELD_OUT_UNITS / len(rows))
    held_out, held_rows, seen_rows = [], 0, 0
    for number, count in enumerate(rows):
        seen_rows += count
        # One unit may have most of the rows: it is for fitting.
        if held_rows < share * seen_rows and 2 * (held_rows + count) <= total:
            held_out.append(number)
            held_rows += count
    return held_out[:MOST_HELD_OUT_UNITS] if held_rows >= LEAST_ROWS else []


def _short_first(units: Units, numbers: Sequence[int]) -> list[int]:
    return sorted(numbers, key=lambda number: sum(units.lengths[number].values()))


def _halves(units: Units, folds: Sequence[Sequence[int]], size: int) -> Iterator[list[_Padded]]:
    """Each fold as its shorter and its longer sequences, in whole batches, with what each half is padded to.

    The same in all folds, and two lengths at most: every shape costs a trace of the model.
    """
    folds = [_short_first(units, fold) for fold in folds]
    middle = len(folds[0]) // size // 2 * size
    short = units.longest(number for fold in folds for number in fold[:middle])
    long = units.longest(number for fold in folds for number in fold[middle:])
    for fold in folds:
        if sum(short.values()) < _WORTH_A_TRACE * sum(long.values()):
            yield [(fold[:middle], short), (fold[middle:], long)]
        else:
            yield [(fold, long)]


def _own_batches(units: Units, parts: Sequence[_Padded], size: int, process: int | None = None) -> Iterator[FoldBatch]:
    """The batches of a fold that one process runs: the very ones of a single process where all hold all.

    Without `process` those of all.
    """
    for part, lengths in parts:
        own = []
        for position, number in enumerate(part):
            holders = units.holders[number]
            if process is None or holders[position // size % len(holders)] == process:
                own.append(number)
        for start in range(0, len(own), size):
            numbers = tuple(own[start : start + size])
            yield FoldBatch(units, numbers, units.longest(numbers) if lengths is None else lengths)


def _units_at_once(batch: Batch) -> int:
    tensors = dict(batch.tensors)
    tokens = tensors.pop("input_ids", tensors.get("attention_mask"))
    if tokens is not None:
        most = max(1, _TOKENS_AT_ONCE // max(1, tokens[0].numel()))
        return min(most, _IMAGES_AT_ONCE) if any(value.ndim > 2 for value in tensors.values()) else most
    short = all(value.ndim <= 2 and value[0].numel() <= _LONGEST_FEATURE_ROW for value in tensors.values())
    some_float = any(value.is_floating_point() for value in tensors.values())
    return _ROWS_AT_ONCE if short and some_float else _IMAGES_AT_ONCE


def _named(batch: Batch) -> dict[str, Tensor]:
    """All tensors of a batch, labels among them."""
    return batch.tensors if batch.labels is None else batch.tensors | {_LABELS: batch.labels}


def _mask_of(batch: Batch, name: str) -> Tensor | None:
    """The (B, T) attention mask that says which entries of an input of its shape are padding."""
    tensors = batch.tensors
    mask = tensors.get("decoder_attention_mask" if name.startswith("decoder_") else "attention_mask")
    return mask if mask is not None and mask.ndim == 2 and mask.shape == tensors[name].shape else None


def _may_be_padded(batch: Batch, name: str) -> bool:
    if name == _LABELS and batch.labels is not None:
        return batch.labels.ndim == 2 and not batch.labels.is_floating_point()
    return _mask_of(batch, name) is not None


def _structure(batch: Batch) -> tuple[str, ...]:
    """Names, dtypes and shapes of a unit's tensors, and the constants that go with them."""
    tensors = (
        f"{name or 'inputs'}: {str(value.dtype).removeprefix('torch.')} "
        + ("of any length" if _may_be_padded(batch, name) else f"of shape {tuple(value.shape[1:])}")
        for name, value in sorted(_named(batch).items())
    )
    return (*tensors, *(f"{name} = {value!r}" for name, value in sorted(batch.constants.items())))


def _row_counts(batch: Batch) -> list[int]:
    """Tokens of each sequence, 1 for anything else."""
    mask, tokens = batch.tensors.get("attention_mask"), batch.tensors.get("input_ids")
    if mask is not None and mask.ndim == 2:
        return mask.count_nonzero(1).tolist()
    return [1 if tokens is None else tokens[0].numel()] * len(batch)


def unit_keys(batch: Batch) -> Iterator[bytes]:
    """A digest of each unit, from its inputs' names, dtypes, shapes and bytes, without what a mask hides."""
    tensors = [(name, value, _mask_of(batch, name)) for name, value in sorted(batch.tensors.items())]
    header = [
        (name, str(value.dtype), tuple(value.shape[1:]) if mask is None else None) for name, value, mask in tensors
    ]
    start = blake2b(repr(header).encode(), digest_size=_KEY_BYTES)
    for row in range(len(batch)):
        digest = start.copy()
        for _, value, mask in tensors:
            digest.update(_bytes(value[row] if mask is None else value[row][mask[row].bool()]))
        yield digest.digest()


def _bytes(value: Tensor) -> memoryview:
    return memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy())


def _gather(
    name: str, sources: Sequence[tuple[dict[str, Tensor], list[int], list[int]]], units: int, length: int | None
) -> Tensor:
    """One tensor of several units, from (tensors, positions in the result, rows) of each batch that has some."""
    first = sources[0][0][name]
    out = first.new_full(
        (units, *(first.shape[1:] if length is None else (length,))), IGNORED_LABEL if name == _LABELS else 0
    )
    for tensors, positions, rows in sources:
        value = tensors[name]
        if length is None:
            out[positions] = value[rows]
        else:
            out[positions, : value.shape[1]] = value[rows]
    return out
