"""The samples of the data (rows, sequences, images), each counted once, whichever processes were given it.

Samples are known by what they contain, and come in the order of their digests, which is as good as a random one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

import torch
from accelerate import PartialState
from torch import Tensor, nn

from hf_lgelu.models.outputs import IGNORED_LABEL, frames_of_sound, is_of_sound, pad_tokens
from hf_lgelu.refit.batches import BARE, LABEL_KEYS, Batch
from hf_lgelu.refit.processes import each_has

_ROWS_AT_ONCE = 1024
_TOKENS_AT_ONCE = 2048
_IMAGES_AT_ONCE = 32
_LONGEST_FEATURE_ROW = 4096
"""A longer row of floats is a waveform, to be run as an image is."""

_KEY_BYTES = 16
_LABELS = LABEL_KEYS[0]
"""The labels' name among the tensors of a sample; no input has it."""


@dataclass(frozen=True)
class Samples:
    """The distinct samples of all processes in the ascending order of their keys.

    Args:
        batches: what this process was given; nothing of it is copied until `take`.
        keys: blake2b digests of the samples' inputs. Labels do not count, nor does padding where there is an attention
            mask.
        rows: how many rows each sample gives: tokens of a sequence, else 1.
        places: {key: (batch, row in it)} of the samples that this process was given.
        own: numbers of the samples that this process runs: of those that several were given, each runs some.
        given: samples given, duplicates among them.
        lengths: {name: length} of each sample's tensors that may be of different lengths, as they were given.
        own_lengths: the same without the padding that was given, where that can be told.
        at_once: the most samples that are run together; `own_at_once` of them without that padding.
        fill: {name: what its sequences are padded with}; the rest with 0.
        left: names whose sequences were given with padding in front, and get more of it there.
        is_cropped: whether `take` leaves out the padding that was given.
    """

    batches: Sequence[Batch]
    keys: Sequence[bytes]
    rows: Sequence[int]
    places: Mapping[bytes, tuple[int, int]]
    own: Set[int]
    given: int
    lengths: Sequence[Mapping[str, int]]
    own_lengths: Sequence[Mapping[str, int]]
    at_once: int
    own_at_once: int
    fill: Mapping[str, int] = field(default_factory=dict)
    left: frozenset[str] = frozenset()
    is_cropped: bool = False

    def cropped(self) -> "Samples":
        """The samples without the padding that they were given with: each has to be as long as the longest run with it.

        Tokenizers pad to the longest of all, or to the most that the model takes, which may be many times a sequence.
        """
        return replace(self, lengths=self.own_lengths, at_once=self.own_at_once, is_cropped=True)

    def short_first(self, numbers: Iterable[int]) -> list[int]:
        """Some samples in the order of their lengths."""
        return sorted(numbers, key=lambda number: sum(self.lengths[number].values()))

    def longest(self, numbers: Iterable[int]) -> dict[str, int]:
        """{name: length} to which the sequences of some samples have to be padded."""
        found: dict[str, int] = {}
        for number in numbers:
            for name, length in self.lengths[number].items():
                found[name] = max(found.get(name, 0), length)
        return found

    def take(self, numbers: Sequence[int], lengths: Mapping[str, int]) -> Batch:
        """The samples `numbers` of this process as one batch, sequences padded to `lengths`."""
        by_batch: dict[int, tuple[list[int], list[int]]] = {}
        for position, number in enumerate(numbers):
            batch, row = self.places[self.keys[number]]
            positions, rows = by_batch.setdefault(batch, ([], []))
            positions.append(position)
            rows.append(row)
        sources = [_Source(self.batches[batch], *where) for batch, where in by_batch.items()]
        names = _named(sources[0].batch)
        taken = {name: self._gather(name, sources, len(numbers), lengths.get(name)) for name in names}
        labels = taken.pop(_LABELS, None)
        inputs = self.batches[0].inputs
        return Batch(taken[BARE] if isinstance(inputs, Tensor) else inputs | taken, labels)

    def _gather(self, name: str, sources: Sequence["_Source"], samples: int, length: int | None) -> Tensor:
        """One tensor of several samples, from what each batch has of them."""
        first = _named(sources[0].batch)[name]
        out = first.new_full((samples, *(first.shape[1:] if length is None else (length,))), self.fill.get(name, 0))
        for batch, positions, rows in sources:
            value = _named(batch)[name][rows]
            if length is None:
                out[positions] = value
                continue
            spans = _own_spans(batch, name, rows) if self.is_cropped else [slice(0, value.shape[1])] * len(rows)
            for position, row, span in zip(positions, value, spans, strict=True):
                own = row[span]
                out[position, slice(length - len(own), None) if name in self.left else slice(len(own))] = own
        return out


class _Source(NamedTuple):
    """Rows of one batch, and their positions among the samples that are taken."""

    batch: Batch
    positions: list[int]
    rows: list[int]


class _Own(NamedTuple):
    """What a process tells the others: samples with their rows and lengths, and what is written of `Samples`."""

    given: int
    structures: set[tuple[str, ...]]
    samples: dict[bytes, "_Size"]
    at_once: int
    own_at_once: int
    left: frozenset[str]


class _Size(NamedTuple):
    """Of one sample: its rows, and the lengths of its sequences as they were given and without that padding."""

    rows: int
    given: Mapping[str, int]
    own: Mapping[str, int]

    def or_longer(self, other: "_Size") -> "_Size":
        """Where several processes have the sample with other padding, what all of them must know."""
        given, own = ({name: max(length, there[name]) for name, length in here.items()}
                      for here, there in ((self.given, other.given), (self.own, other.own)))  # fmt: skip
        return _Size(self.rows, given, own)


def read_samples(
    batches: Iterable[Batch], state: PartialState | None = None, *, model: nn.Module | None = None
) -> Samples:
    """Every sample once; of several with the same key the one given first, with its labels.

    Samples without a row (nothing but padding) are left out. Sequences of different lengths are padded as the model's
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
    found: dict[bytes, _Size] = {}
    for number, batch in enumerate(batches):
        given, own_of_rows = _lengths(batch)
        counts = _row_counts(batch, frames)
        for row, (key, count, lengths) in enumerate(zip(sample_keys(batch), counts, own_of_rows, strict=True)):
            if count and key not in places:
                places[key], found[key] = (number, row), _Size(count, given, lengths)
    own = _Own(
        given=sum(map(len, batches)),
        structures={_structure(batch) for batch in batches},
        samples=found,
        at_once=min(map(_samples_at_once, batches), default=_ROWS_AT_ONCE),
        own_at_once=min((_samples_at_once(batch, is_cropped=True) for batch in batches), default=_ROWS_AT_ONCE),
        left=frozenset().union(*map(_padded_in_front, batches)),
    )
    parts, process = ([own], 0) if state is None else (each_has(own), state.process_index)
    _require_alike(parts)
    everything: dict[bytes, _Size] = {}
    for part in parts:
        for key, size in part.samples.items():
            everything[key] = size.or_longer(everything.get(key, size))
    keys = sorted(everything)
    return Samples(
        batches=batches,
        keys=keys,
        rows=[everything[key].rows for key in keys],
        places=places,
        own=frozenset(number for number, key in enumerate(keys) if _owner(number, key, parts) == process),
        given=sum(part.given for part in parts),
        lengths=[everything[key].given for key in keys],
        own_lengths=[everything[key].own for key in keys],
        at_once=min(part.at_once for part in parts),
        own_at_once=min(part.own_at_once for part in parts),
        fill={_LABELS: IGNORED_LABEL} | ({} if model is None else pad_tokens(model)),
        left=frozenset().union(*(part.left for part in parts)),
    )


def _owner(number: int, key: bytes, parts: Sequence[_Own]) -> int:
    """The process that runs a sample: those that were given it take turns."""
    holders = [process for process, part in enumerate(parts) if key in part.samples]
    return holders[number % len(holders)]


def _require_alike(parts: Sequence[_Own]) -> None:
    empty = [process for process, part in enumerate(parts) if not part.samples]
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


def sample_keys(batch: Batch) -> Iterator[bytes]:
    """A digest of each sample, from its inputs' names, dtypes, shapes and bytes, without what a mask hides."""
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
    """The batches in pieces of at most `batch_size` samples, by default those of `deal_folds`, as views."""
    for batch in batches:
        size = batch_size or _samples_at_once(batch)
        for start in range(0, len(batch), size):
            yield batch[start : start + size]


def _samples_at_once(batch: Batch, *, is_cropped: bool = False) -> int:
    tensors = dict(batch.tensors)
    name = "input_ids" if "input_ids" in tensors else "attention_mask"
    tokens = tensors.pop("input_ids", tensors.get("attention_mask"))
    if tokens is not None:
        longest = tokens[0].numel()
        if is_cropped and _may_be_padded(batch, name):
            counted = tensors["attention_mask"].any(1).nonzero().flatten().tolist()  # the rest is left out
            longest = max((span.stop - span.start for span in _own_spans(batch, name, counted)), default=1)
        most = max(1, _TOKENS_AT_ONCE // max(1, longest))
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
    """Names of a batch's sequences that begin with padding somewhere."""
    found = set()
    for name in filter(lambda name: _may_be_padded(batch, name), _named(batch)):
        mask = batch.tensors.get(_mask_name(batch, name))
        if mask is not None and mask.ndim == 2 and bool(((mask[:, :1] == 0) & (mask[:, -1:] != 0)).any()):
            found.add(name)
    return frozenset(found)


def _lengths(batch: Batch) -> tuple[dict[str, int], list[dict[str, int]]]:
    """{name: length} of the sequences of a batch, and for each row of them without their padding."""
    given = {name: value.shape[1] for name, value in _named(batch).items() if _may_be_padded(batch, name)}
    spans = {name: _own_spans(batch, name, range(len(batch))) for name in given}
    own = [{name: spans[name][row].stop - spans[name][row].start for name in given} for row in range(len(batch))]
    return given, own


def _own_spans(batch: Batch, name: str, rows: Sequence[int]) -> list[slice]:
    """Where some rows of a sequence have no padding in front or behind; all of them where that cannot be told.

    Nor where something without the mask's shape is as long: boxes (B, T, 4) or embeddings (B, T, C) go with the tokens.
    """
    width = _named(batch)[name].shape[1]
    mask = _mask_of(batch, name)
    beside = [value for other, value in batch.tensors.items() if _mask_of(batch, other) is None]
    if mask is None or not width or any(width in value.shape[1:] for value in beside):
        return [slice(0, width)] * len(rows)
    counted = mask[list(rows)].ne(0).to(torch.uint8)
    begins, behind = counted.argmax(1), counted.flip(1).argmax(1)
    return [slice(begin, width - left) for begin, left in zip(begins.tolist(), behind.tolist(), strict=True)]


def _structure(batch: Batch) -> tuple[str, ...]:
    """Names, dtypes and shapes of a sample's tensors, and the constants that go with them."""
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
    """The (B, T) attention mask that says which entries of a tensor of its shape are padding."""
    mask = batch.tensors.get(_mask_name(batch, name))
    return mask if mask is not None and mask.ndim == 2 and mask.shape == _named(batch)[name].shape else None


def _mask_name(batch: Batch, name: str) -> str:
    """Labels are with what is decoded, if anything."""
    is_of_labels = name == _LABELS and batch.labels is not None
    is_decoded = name.startswith("decoder_") or (is_of_labels and any(n.startswith("decoder_") for n in batch.tensors))
    return "decoder_attention_mask" if is_decoded else "attention_mask"


def _bytes(value: Tensor) -> memoryview:
    return memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy())
