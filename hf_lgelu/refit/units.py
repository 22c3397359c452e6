"""The distinct units (rows, sequences, images) of the calibration inputs, known by what they contain."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from hf_lgelu.refit.calibration import BARE, LABEL_KEYS, Batch

KEY_BYTES = 16
IGNORED_LABEL = -100
"""What the labels of sequences are padded with: cross entropy ignores it by default."""

LABELS = LABEL_KEYS[0]
"""The labels' name among the tensors of a unit; no input has it."""


@dataclass(frozen=True)
class Units:
    """Distinct units in the ascending order of their keys, whatever order they were given in.

    Args:
        batches: what was given; nothing of it is copied until `take`.
        structure: names, dtypes and shapes of a unit's tensors, and the constants that go with them; None without
            a unit.
        keys: blake2b digests of the units' inputs. Labels do not count, nor does padding where there is an attention
            mask.
        places: (batch, row in it) of each unit.
        rows: how many rows each unit gives: tokens of a sequence, else 1.
        given: units given, duplicates among them.
        lengths: the longest of the tensors that may be of different lengths, by name.
    """

    batches: Sequence[Batch]
    structure: tuple | None
    keys: Sequence[bytes]
    places: Sequence[tuple[int, int]]
    rows: Sequence[int]
    given: int
    lengths: Mapping[str, int]

    def take(self, numbers: Sequence[int], lengths: Mapping[str, int]) -> Batch:
        """The units `numbers` as one batch, sequences padded on the right to `lengths`."""
        by_batch: dict[int, tuple[list[int], list[int]]] = {}
        for position, number in enumerate(numbers):
            batch, row = self.places[number]
            positions, rows = by_batch.setdefault(batch, ([], []))
            positions.append(position)
            rows.append(row)
        sources = [(_named(self.batches[batch]), *where) for batch, where in by_batch.items()]
        taken = {name: _gather(name, sources, len(numbers), lengths.get(name)) for name in sources[0][0]}
        labels = taken.pop(LABELS, None)
        inputs = self.batches[0].inputs
        return Batch(taken[BARE] if isinstance(inputs, Tensor) else inputs | taken, labels)


def distinct_units(batches: Iterable[Batch]) -> Units:
    """Every unit once; of several with the same key the one whose padding and labels come first, byte by byte.

    Units without a row (nothing but padding) are left out.

    Raises ValueError where batches differ in names, dtypes, shapes or constants; tensors with the shape of the
    attention mask may differ in length.
    """
    batches = [batch for batch in batches if len(batch)]
    structure = _same_structure(batches)
    places: dict[bytes, list[tuple[int, int]]] = {}
    rows: dict[bytes, int] = {}
    for number, batch in enumerate(batches):
        for row, (key, count) in enumerate(zip(_keys(batch), _row_counts(batch), strict=True)):
            if count:
                places.setdefault(key, []).append((number, row))
                rows[key] = count
    keys = sorted(places)
    return Units(
        batches=batches,
        structure=structure,
        keys=keys,
        places=[_first_place(places[key], batches) for key in keys],
        rows=[rows[key] for key in keys],
        given=sum(map(len, batches)),
        lengths=_longest(batches),
    )


def _named(batch: Batch) -> dict[str, Tensor]:
    """All tensors of a batch, labels among them."""
    return batch.tensors if batch.labels is None else batch.tensors | {LABELS: batch.labels}


def _mask_of(batch: Batch, name: str) -> Tensor | None:
    """The (B, T) attention mask that says which entries of an input of its shape are padding."""
    tensors = batch.tensors
    mask = tensors.get("decoder_attention_mask" if name.startswith("decoder_") else "attention_mask")
    return mask if mask is not None and mask.ndim == 2 and mask.shape == tensors[name].shape else None


def _may_be_padded(batch: Batch, name: str) -> bool:
    if name == LABELS:
        return batch.labels.ndim == 2 and not batch.labels.is_floating_point()
    return _mask_of(batch, name) is not None


def _longest(batches: Sequence[Batch]) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for batch in batches:
        for name, value in _named(batch).items():
            if _may_be_padded(batch, name):
                lengths[name] = max(lengths.get(name, 0), value.shape[1])
    return lengths


def _same_structure(batches: Sequence[Batch]) -> tuple | None:
    structures = {_structure(batch) for batch in batches}
    if len(structures) > 1:
        first, second = sorted(structures)[:2]
        raise ValueError(different_structures(first, second))
    return next(iter(structures), None)


def different_structures(first: tuple, second: tuple) -> str:
    """What to tell a user about two batches that do not go together."""
    return (
        f"calibration batches differ: {'; '.join(sorted({*first} - {*second}))} in one, "
        f"{'; '.join(sorted({*second} - {*first}))} in another. All must have the same names, dtypes, shapes and "
        "constants. Only sequences may differ in length: tensors of the shape (B, T) of an attention_mask, which "
        "must then be given"
    )


def _structure(batch: Batch) -> tuple[str, ...]:
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


def _keys(batch: Batch) -> Iterator[bytes]:
    """Of each unit, from its inputs' names, dtypes, shapes and bytes, without what the attention mask hides."""
    header, contents = [], []
    for name, value in sorted(batch.tensors.items()):
        mask = _mask_of(batch, name)
        header.append((name, str(value.dtype), None if mask is not None else tuple(value.shape[1:])))
        if mask is None:
            contents.append(_split_by_unit(value))
        else:
            kept = mask.bool()
            ends = (kept.sum(1).cumsum(0) * value.element_size()).tolist()
            contents.append((_bytes(value[kept]), [0, *ends]))
    start = blake2b(repr(header).encode(), digest_size=KEY_BYTES)
    for row in range(len(batch)):
        digest = start.copy()
        for content, ends in contents:
            digest.update(content[ends[row] : ends[row + 1]])
        yield digest.digest()


def _first_place(places: list[tuple[int, int]], batches: Sequence[Batch]) -> tuple[int, int]:
    """Of units with the same key, one that does not depend on the order in which they were given."""
    if len(places) == 1:
        return places[0]

    def content(place: tuple[int, int]) -> list[tuple[tuple[int, ...], bytes]]:
        unit = [(name, value[place[1]]) for name, value in sorted(_named(batches[place[0]]).items())]
        return [(tuple(value.shape), bytes(_bytes(value.reshape(-1)))) for _, value in unit]

    return min(places, key=content)


def _split_by_unit(value: Tensor) -> tuple[memoryview, list[int]]:
    content = _bytes(value)
    size = len(content) // len(value)
    return content, [size * row for row in range(len(value) + 1)]


def _bytes(value: Tensor) -> memoryview:
    return memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy())


def _gather(
    name: str, sources: Sequence[tuple[dict[str, Tensor], list[int], list[int]]], units: int, length: int | None
) -> Tensor:
    """One tensor of several units, from (tensors, positions in the result, rows) of each batch that has some."""
    first = sources[0][0][name]
    out = first.new_full(
        (units, *(first.shape[1:] if length is None else (length,))), IGNORED_LABEL if name == LABELS else 0
    )
    for tensors, positions, rows in sources:
        value = tensors[name]
        if length is None:
            out[positions] = value[rows]
        else:
            out[positions, : value.shape[1]] = value[rows]
    return out
