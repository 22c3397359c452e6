"""Which units are held out, which fold each of the others belongs to, and which process runs them in which chunks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from hf_lgelu.refit.calibration import Batch, take_units
from hf_lgelu.refit.units import Units, different_structures, distinct_units

FOLDS = 4
LEAST_ROWS = 16
"""Fewer distinct rows are refused."""

LEAST_ROWS_TO_HOLD_OUT = 64
MOST_HELD_OUT_UNITS = 1024
_HELD_OUT_SHARE = 1 / 8

_ROWS_IN_CHUNK = 1024
_TOKENS_IN_CHUNK = 2048
_IMAGES_IN_CHUNK = 32
_LONGEST_FEATURE_ROW = 4096
"""A longer row of floats is a waveform, to be run as an image is."""


@dataclass(frozen=True)
class Chunk:
    """Units of one fold, run through the model together; gathered from what was given at each `load`.

    Args:
        units: where they come from.
        numbers: which of those.
        lengths: what sequences are padded to, by name.
    """

    units: Units = field(repr=False)
    numbers: tuple[int, ...]
    lengths: Mapping[str, int] = field(default_factory=dict)

    def load(self) -> Batch:
        """Inputs and labels."""
        return self.units.take(self.numbers, self.lengths)

    @property
    def inputs(self) -> Tensor | dict[str, Any]:
        """Those of `load`."""
        return self.load().inputs

    @property
    def labels(self) -> Tensor | None:
        """Those of `load`."""
        return self.load().labels

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """One 63-bit integer per unit, which depends on nothing but its content."""
        return tuple(int.from_bytes(self.units.keys[number][:8], "big") >> 1 for number in self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class CalibrationPlan:
    """What is fitted on and what is not.

    Args:
        folds: the chunks of each fold that this process runs, possibly none; one fold without cross-validation.
        held_out: its chunks of the part that nothing is fitted on; () under 64 rows.
        units: units given; `distinct_units` without duplicates and `rows` of those. These and the next two count
            over all processes.
        held_out_units: units of the held-out part, with `held_out_rows` rows.
        example: one unit that this process has, to run or trace a model on.
    """

    folds: tuple[tuple[Chunk, ...], ...]
    held_out: tuple[Chunk, ...]
    units: int
    distinct_units: int
    rows: int
    held_out_units: int
    held_out_rows: int
    example: Chunk

    @property
    def first(self) -> Chunk:
        """The first chunk that this process fits on, or `example`."""
        return next((chunk for fold in self.folds for chunk in fold), self.example)


def plan_calibration(
    batches: Iterable[Batch], *, chunk_size: int | None = None, state: PartialState | None = None
) -> CalibrationPlan:
    """Splits calibration inputs by distinct unit; neither their order nor duplicates change the result.

    Args:
        batches: of this process; read once and kept.
        chunk_size: the most units run at once; by default 1,024 rows of features, 2,048 tokens, 32 images.
        state: the processes that share the work, each of which must call; None for this one alone.

    Raises ValueError for batches that do not go together, and for fewer than 16 distinct rows.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    processes, process = (1, 0) if state is None else (state.num_processes, state.process_index)
    units = distinct_units(batches)
    everything = _everything(units, processes)
    _check_enough(everything)
    keys = sorted(everything.rows)
    rows = [everything.rows[key] for key in keys]
    held_out, folds, size = _split(rows, chunk_size or everything.limit)
    parts = _parts_of_process([*folds, held_out], size, keys, everything, process, processes)
    own = {key: number for number, key in enumerate(units.keys)}
    chunks = [
        tuple(Chunk(units, tuple(own[keys[number]] for number in chunk), everything.lengths) for chunk in part)
        for part in parts
    ]
    return CalibrationPlan(
        folds=tuple(chunks[:-1]),
        held_out=chunks[-1],
        units=everything.given,
        distinct_units=len(keys),
        rows=sum(rows),
        held_out_units=len(held_out),
        held_out_rows=sum(rows[number] for number in held_out),
        example=Chunk(units, (0,), everything.lengths),
    )


def cut_batches(batches: Iterable[Batch], chunk_size: int | None = None) -> Iterator[Batch]:
    """The batches in pieces of at most `chunk_size` units, by default those of `plan_calibration`, as views."""
    for batch in batches:
        size = chunk_size or _units_at_once(batch)
        for start in range(0, len(batch), size):
            yield take_units(batch, slice(start, start + size))


@dataclass(frozen=True)
class _Everything:
    """The distinct units of all processes: what each of them needs to make the same plan."""

    given: int
    rows: Mapping[bytes, int]
    holders: Mapping[bytes, Sequence[int]]
    lengths: Mapping[str, int]
    limit: int


def _everything(units: Units, processes: int) -> _Everything:
    own = {
        "given": units.given,
        "structure": units.structure,
        "rows": dict(zip(units.keys, units.rows, strict=True)),
        "lengths": units.lengths,
        "limit": _default_chunk_size(units),
    }
    parts = [own] if processes == 1 else gather_object([own])
    empty = [process for process, part in enumerate(parts) if not part["rows"]]
    if empty and len(empty) < len(parts):
        raise ValueError(
            f"process {empty[0]} was given no calibration input; give every process all of them, or a share"
        )
    structures = {part["structure"] for part in parts} - {None}
    if len(structures) > 1:
        raise ValueError(different_structures(*sorted(structures)[:2]))
    holders: dict[bytes, list[int]] = {}
    for process, part in enumerate(parts):
        for key in part["rows"]:
            holders.setdefault(key, []).append(process)
    return _Everything(
        given=sum(part["given"] for part in parts),
        rows={key: count for part in parts for key, count in part["rows"].items()},
        holders=holders,
        lengths={
            name: max(part["lengths"].get(name, 0) for part in parts) for part in parts for name in part["lengths"]
        },
        limit=min(part["limit"] for part in parts),
    )


def _default_chunk_size(units: Units) -> int:
    """The most units run at once, by the largest of this process's batches."""
    return min((_units_at_once(batch) for batch in units.batches), default=_ROWS_IN_CHUNK)


def _units_at_once(batch: Batch) -> int:
    tensors = dict(batch.tensors)
    tokens = tensors.pop("input_ids", tensors.get("attention_mask"))
    if tokens is not None:
        most = max(1, _TOKENS_IN_CHUNK // max(1, tokens[0].numel()))
        return min(most, _IMAGES_IN_CHUNK) if any(value.ndim > 2 for value in tensors.values()) else most
    short = all(value.ndim <= 2 and value[0].numel() <= _LONGEST_FEATURE_ROW for value in tensors.values())
    some_float = any(value.is_floating_point() for value in tensors.values())
    return _ROWS_IN_CHUNK if short and some_float else _IMAGES_IN_CHUNK


def _check_enough(everything: _Everything) -> None:
    rows = sum(everything.rows.values())
    if rows < LEAST_ROWS:
        raise ValueError(
            f"a refit needs at least {LEAST_ROWS} distinct rows (tokens of sequences, else units), got {rows} in "
            f"{len(everything.rows)} distinct units of {everything.given} given; give more calibration inputs, at "
            "best several times the width of the widest layer"
        )


def _split(rows: Sequence[int], limit: int) -> tuple[list[int], list[list[int]], int]:
    """Held-out units, folds of equal size and the size of their chunks, from the rows of all units by key."""
    held_out = _hold_out(rows)
    apart = set(held_out)
    rest = [number for number in range(len(rows)) if number not in apart]
    if not held_out or len(rest) < FOLDS:
        size = -(-len(rest) // -(-len(rest) // limit))
        return held_out, [rest], size
    # Whole chunks only: every distinct size of a chunk costs a trace of the model. What is left over is held out.
    size = len(rest) // FOLDS
    chunk = size // -(-size // limit)
    size -= size % chunk
    folds = [rest[size * fold : size * (fold + 1)] for fold in range(FOLDS)]
    return sorted(held_out + rest[size * FOLDS :]), folds, chunk


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


def _parts_of_process(
    parts: Sequence[Sequence[int]],
    size: int,
    keys: Sequence[bytes],
    everything: _Everything,
    process: int,
    processes: int,
) -> Iterator[list[Sequence[int]]]:
    """The chunks of each part that one process runs: every unit is run by one of the processes that hold it."""
    if all(len(everything.holders[key]) == processes for key in keys):
        # The very chunks that one process would make, in turn.
        start = 0
        for part in parts:
            chunks = _cut(part, size)
            yield chunks[(process - start) % processes :: processes]
            start += len(chunks)
        return
    for part in parts:
        yield _cut([number for number in part if _runner(number, everything.holders[keys[number]]) == process], size)


def _runner(number: int, holders: Sequence[int]) -> int:
    return holders[number % len(holders)]


def _cut(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]
