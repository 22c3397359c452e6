"""The units of the data (rows, sequences, images), each counted once, whichever process was given it.

Units are known by what they contain, and come in the order of their digests, which is as good as a random one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import torch
from accelerate import PartialState
from torch import Tensor, nn

from hf_lgelu.models.padding import frames_of_sound, is_of_sound, pad_tokens
from hf_lgelu.models.task_outputs import IGNORED_LABEL
from hf_lgelu.refit.batches import BARE, LABEL_KEYS, Batch
from hf_lgelu.refit.processes import each_has

_ROWS_AT_ONCE = 1024
_TOKENS_AT_ONCE = 2048
_IMAGES_AT_ONCE = 32
_LONGEST_FEATURE_ROW = 4096
"""A longer row of floats is a waveform, to be run as an image is."""

_KEY_BYTES = 16
_LABELS = LABEL_KEYS[0]
"""The labels' name among the tensors of a unit; no input has it."""


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
        fill: {name: what its sequences are padded with}; the rest with 0.
        left: names whose sequences were given with padding in front, and get more of it there.
    """

    batches: Sequence[Batch]
    keys: Sequence[bytes]
    rows: Sequence[int]
    holders: Sequence[Sequence[int]]
    places: Mapping[bytes, tuple[int, int]]
    given: int
    lengths: Sequence[Mapping[str, int]]
    at_once: int
    fill: Mapping[str, int] = field(default_factory=dict)
    left: frozenset[str] = frozenset()

    def longest(self, numbers: Iterable[int]) -> dict[str, int]:
        """{name: length} to which the sequences of some units have to be padded."""
        found: dict[str, int] = {}
        for number in numbers:
            for name, length in self.lengths[number].items():
                found[name] = max(found.get(name, 0), length)
        return found

    def take(self, numbers: Sequence[int], lengths: Mapping[str, int]) -> Batch:
        """The units `numbers` of this process as one batch, sequences padded to `lengths`."""
        by_batch: dict[int, tuple[list[int], list[int]]] = {}
        for position, number in enumerate(numbers):
            batch, row = self.places[self.keys[number]]
            positions, rows = by_batch.setdefault(batch, ([], []))
            positions.append(position)
            rows.append(row)
        sources = [(_named(self.batches[batch]), *where) for batch, where in by_batch.items()]
        taken = {name: self._gather(name, sources, len(numbers), lengths.get(name)) for name in sources[0][0]}
        labels = taken.pop(_LABELS, None)
        inputs = self.batches[0].inputs
        return Batch(taken[BARE] if isinstance(inputs, Tensor) else inputs | taken, labels)

    def _gather(
        self, name: str, sources: Sequence[tuple[dict[str, Tensor], list[int], list[int]]], units: int,
        length: int | None,
    ) -> Tensor:  # fmt: skip
        """One tensor of several units, from (tensors, positions in the result, rows) of each batch that has some."""
        first = sources[0][0][name]
        out = first.new_full((units, *(first.shape[1:] if length is None else (length,))), self.fill.get(name, 0))
        for tensors, positions, rows in sources:
            value = tensors[name]
            if length is None:
                out[positions] = value[rows]
            elif name in self.left:
                out[positions, length - value.shape[1] :] = value[rows]
            else:
                out[positions, : value.shape[1]] = value[rows]
        return out


class _Own(NamedTuple):
    """What a process tells the others: units with their rows and lengths, and what is written of `Units`."""

    given: int
    structures: set[tuple[str, ...]]
    units: dict[bytes, tuple[int, Mapping[str, int]]]
    at_once: int
    left: frozenset[str]


def read_units(batches: Iterable[Batch], state: PartialState | None = None, *, model: nn.Module | None = None) -> Units:
    """Every unit once; of several with the same key the one given first, with its labels.

    Units without a row (nothing but padding) are left out. Sequences of different lengths are padded as the model's
    config says, and where the given ones were.

    Args:
        batches: of this process; read once and kept.
        state: the processes that share the work, each of which must call; None for this one alone.
        model: that takes them.

    Raises ValueError where batches differ in names, dtypes, shapes or constants; tensors with the shape of the
    attention mask may differ in length.
    """
    batches = [batch for batch in batches if len(batch)]
    frames = None if model is None else frames_of_sound(model)
    places: dict[bytes, tuple[int, int]] = {}
    found: dict[bytes, tuple[int, Mapping[str, int]]] = {}
    for number, batch in enumerate(batches):
        given = {name: value.shape[1] for name, value in _named(batch).items() if _may_be_padded(batch, name)}
        for row, (key, count) in enumerate(zip(unit_keys(batch), _row_counts(batch, frames), strict=True)):
            if count and key not in places:
                places[key], found[key] = (number, row), (count, given)
    own = _Own(
        given=sum(map(len, batches)),
        structures={_structure(batch) for batch in batches},
        units=found,
        at_once=min(map(_units_at_once, batches), default=_ROWS_AT_ONCE),
        left=frozenset().union(*map(_padded_in_front, batches)),
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
        fill={_LABELS: IGNORED_LABEL} | ({} if model is None else pad_tokens(model)),
        left=frozenset().union(*(part.left for part in parts)),
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


def cut_batches(batches: Iterable[Batch], batch_size: int | None = None) -> Iterator[Batch]:
    """The batches in pieces of at most `batch_size` units, by default those of `deal_folds`, as views."""
    for batch in batches:
        size = batch_size or _units_at_once(batch)
        for start in range(0, len(batch), size):
            yield batch[start : start + size]


def _units_at_once(batch: Batch) -> int:
    tensors = dict(batch.tensors)
    tokens = tensors.pop("input_ids", tensors.get("attention_mask"))
    if tokens is not None:
        most = max(1, _TOKENS_AT_ONCE // max(1, tokens[0].numel()))
        return min(most, _IMAGES_AT_ONCE) if any(value.ndim > 2 for value in tensors.values()) else most
    short = all(value.ndim <= 2 and value[0].numel() <= _LONGEST_FEATURE_ROW for value in tensors.values())
    some_float = any(value.is_floating_point() for value in tensors.values())
    return _ROWS_AT_ONCE if short and some_float else _IMAGES_AT_ONCE


def _row_counts(batch: Batch, frames: Callable[[Tensor], Tensor] | None) -> list[int]:
    """Tokens of each sequence, `frames` of a sound (or its steps, where nobody says how many), 1 for anything else."""
    mask, tokens = batch.tensors.get("attention_mask"), batch.tensors.get("input_ids")
    if mask is not None and mask.ndim == 2:
        counts = mask.count_nonzero(1)
        if is_of_sound(mask, batch.tensors):
            counts = counts if frames is None else frames(counts).clamp(min=0)
        return counts.tolist()
    return [1 if tokens is None else tokens[0].numel()] * len(batch)


def _padded_in_front(batch: Batch) -> frozenset[str]:
    """Names of a batch's sequences that begin with padding somewhere; labels are with what is decoded, if anything."""
    named = _named(batch)
    has_decoder = any(name.startswith("decoder_") for name in named)
    found = set()
    for name in filter(lambda name: _may_be_padded(batch, name), named):
        decoded = name.startswith("decoder_") or (name == _LABELS and has_decoder)
        mask = named.get("decoder_attention_mask" if decoded else "attention_mask")
        if mask is not None and mask.ndim == 2 and bool(((mask[:, :1] == 0) & (mask[:, -1:] != 0)).any()):
            found.add(name)
    return frozenset(found)


def _structure(batch: Batch) -> tuple[str, ...]:
    """Names, dtypes and shapes of a unit's tensors, and the constants that go with them."""
    tensors = (
        f"{name or 'inputs'}: {str(value.dtype).removeprefix('torch.')} "
        + ("of any length" if _may_be_padded(batch, name) else f"of shape {tuple(value.shape[1:])}")
        for name, value in sorted(_named(batch).items())
    )
    return (*tensors, *(f"{name} = {value!r}" for name, value in sorted(batch.constants.items())))


def _named(batch: Batch) -> dict[str, Tensor]:
    """All tensors of a batch, labels among them."""
    return batch.tensors if batch.labels is None else batch.tensors | {_LABELS: batch.labels}


def _may_be_padded(batch: Batch, name: str) -> bool:
    if name == _LABELS and batch.labels is not None:
        return batch.labels.ndim == 2 and not batch.labels.is_floating_point()
    return _mask_of(batch, name) is not None


def _mask_of(batch: Batch, name: str) -> Tensor | None:
    """The (B, T) attention mask that says which entries of an input of its shape are padding."""
    tensors = batch.tensors
    mask = tensors.get("decoder_attention_mask" if name.startswith("decoder_") else "attention_mask")
    return mask if mask is not None and mask.ndim == 2 and mask.shape == tensors[name].shape else None


def _bytes(value: Tensor) -> memoryview:
    return memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy())
