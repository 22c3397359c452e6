"""The distinct samples of the data, dealt into four folds to fit on and a part that is held out.

Each fold is cut into batches, short sequences first. The same inputs always give the same folds, in any order and on
any number of processes, because `Samples` are sorted by their keys. Each process runs a part of the batches.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from hf_lgelu.formats import counted
from hf_lgelu.networks.batches import TRIED, Batch, cut_batches, nothing_given, read_batches, sample_keys
from hf_lgelu.networks.outputs import LAYERS, OutputReader, channel_axis
from hf_lgelu.networks.run import forward_hooks, run_example
from hf_lgelu.networks.sites import KINDS, find_sites
from hf_lgelu.processes import each_has, known_processes, own_part
from hf_lgelu.refit.samples import Samples, choose_padding

FOLDS = 4
LEAST_ROWS = 16
"""Fewer distinct rows are refused."""

LEAST_ROWS_TO_HOLD_OUT = 64
LEAST_SAMPLES_TO_HOLD_OUT = 16
"""With fewer samples, none is held out. Sequences are exempt, because their tokens are rows."""

MOST_HELD_OUT_SAMPLES = 1024
_HELD_OUT_SHARE = 1 / 8

_WORTH_A_SHAPE = 0.8
"""The shorter half of the sequences gets its own shape if its longest is below this share of the longest of all."""


def deal_folds(
    samples: Samples, read: OutputReader | None = None, *, batch_size: int | None = None, is_choice: bool = False
) -> "Folds":
    """The samples in four folds and a part that is held out.

    The outputs that `read` reads decide how sequences of different lengths are padded. `is_choice` says that the
    held-out samples will choose one of several networks. If enough samples are held out, one half of them chooses a
    network, and the other half measures it.

    Raises ValueError for fewer than 16 distinct rows.
    """
    is_few = samples.are_batches or sum(samples.rows) == len(samples.rows) < LEAST_ROWS_TO_HOLD_OUT
    if read is not None and is_few:
        samples = replace(samples, rows=_rows_of_maps(read.model, samples))
    is_few = is_few and len(samples.rows) < LEAST_SAMPLES_TO_HOLD_OUT
    if sum(samples.rows) < LEAST_ROWS:
        raise ValueError(
            f"a refit needs at least {LEAST_ROWS} different rows (tokens of texts, else samples), and the "
            f"{counted(samples.given, 'sample')} given have {sum(samples.rows)}; give more inputs, at best several "
            "times the width of the widest layer"
        )
    samples = samples if read is None else choose_padding(samples, read)

    size = 1 if samples.are_batches else batch_size or samples.at_once
    held_out, dealt, size = _deal(samples.rows, size, is_few)

    # Every shape costs a recording, so each fold has two lengths: one of its shorter half, one of its longer half.
    dealt = [samples.short_first(fold) for fold in dealt]
    middle = len(dealt[0]) // size // 2 * size
    short, long = (
        samples.longest(number for fold in dealt for number in fold[half])
        for half in (slice(middle), slice(middle, None))
    )
    if sum(short.values()) >= _WORTH_A_SHAPE * sum(long.values()):
        middle, long = 0, samples.longest(itertools.chain(*dealt))
    folds = tuple(
        (*_batches(samples, fold[:middle], size, short), *_batches(samples, fold[middle:], size, long))
        for fold in dealt
    )
    held_out = choosing = samples.short_first(held_out)
    if is_choice and len(held_out) >= 2 * LEAST_SAMPLES_TO_HOLD_OUT:
        choosing, held_out = held_out[::2], held_out[1::2]
    judging, choosing_batches = (tuple(_batches(samples, part, size)) for part in (held_out, choosing))
    return Folds(samples, folds, judging, choosing_batches)


def _rows_of_maps(model: nn.Module, samples: Samples) -> list[int]:
    """The number of rows of each sample (nodes, edges, pixels) at the layer with the most rows, else at a gate."""
    counts = list[int]()

    def see(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        counts.append(output.numel() // output.shape[channel_axis(module, output)])

    numbers = range(len(samples.keys))
    rows: dict[int, int] = {}
    # Samples that run together have one shape, and therefore equally many rows.
    parts = [[number] for number in numbers] if samples.are_batches else [list(numbers[:TRIED])]
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    layers = layers or [site.module for site in find_sites(model, KINDS)]
    with forward_hooks(layers, see):
        for part in parts:
            counts.clear()
            run_example(model, samples.take(part, samples.longest(part)).inputs)
            rows |= dict.fromkeys(part, max(1, max(counts, default=1) // len(part)))
    return [rows.get(number, min(rows.values())) for number in numbers]


def _deal(rows: Sequence[int], at_once: int, is_few: bool) -> tuple[list[int], list[list[int]], int]:
    """The held-out samples, folds of equal size and their batch size, from the number of rows of each sample."""
    held_out = [] if is_few else _hold_out(rows)
    apart = set(held_out)
    rest = [number for number in range(len(rows)) if number not in apart]
    if not held_out or len(rest) < FOLDS:
        return held_out, [rest], -(-len(rest) // -(-len(rest) // at_once))
    # Folds hold whole batches, because every size of a batch costs a recording. Left-over samples are held out.
    size = len(rest) // FOLDS
    together = size // -(-size // at_once)
    size -= size % together
    folds = [rest[size * fold : size * (fold + 1)] for fold in range(FOLDS)]
    return sorted(held_out + rest[size * FOLDS :]), folds, together


def _hold_out(rows: Sequence[int]) -> list[int]:
    """Numbers of samples with an eighth of all rows, at least 16, evenly spread; [] where too few rows remain."""
    total = sum(rows)
    if total < LEAST_ROWS_TO_HOLD_OUT:
        return []
    share = min(max(LEAST_ROWS, total * _HELD_OUT_SHARE) / total, MOST_HELD_OUT_SAMPLES / len(rows))
    held_out, held_rows, seen_rows = [], 0, 0
    for number, count in enumerate(rows):
        seen_rows += count
        # A sample that has most of the rows is kept for fitting.
        if held_rows < share * seen_rows and 2 * (held_rows + count) <= total:
            held_out.append(number)
            held_rows += count
    return held_out[:MOST_HELD_OUT_SAMPLES] if held_rows >= LEAST_ROWS else []


def _batches(
    samples: Samples, numbers: Sequence[int], size: int, lengths: Mapping[str, int] | None = None
) -> "Iterator[FoldBatch]":
    """Batches of at most `size` samples, padded to `lengths`, or each to its longest sample."""
    for start in range(0, len(numbers), size):
        some = tuple(numbers[start : start + size])
        yield FoldBatch(samples, some, samples.longest(some) if lengths is None else lengths)


@dataclass(frozen=True)
class FoldBatch:
    """Samples of one fold that run through the model together. Each `load` gathers them from the given batches."""

    samples: Samples = field(repr=False)
    numbers: tuple[int, ...]
    lengths: Mapping[str, int]

    def load(self) -> Batch:
        """Inputs and labels."""
        return self.samples.take(self.numbers, self.lengths)

    @property
    def shape(self) -> tuple[Any, ...]:
        """A key of the tensors' shapes, equal for equal shapes. A batch that is one sample has a key of its own."""
        return self.numbers if self.samples.are_batches else (len(self), *sorted(self.lengths.items()))

    @property
    def seeds(self) -> list[int]:
        """A 63-bit integer for each sample, which depends only on the sample's content."""
        return [int.from_bytes(self.samples.keys[number][:8], "big") >> 1 for number in self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def pieces(self, most: int) -> "Iterator[FoldBatch]":
        """The samples in the fewest batches of at most `most` samples, padded as the whole batch."""
        size = -(-len(self) // -(-len(self) // most))
        for start in range(0, len(self), size):
            yield FoldBatch(self.samples, self.numbers[start : start + size], self.lengths)

    def share(self) -> "tuple[FoldBatch, float]":
        """(this process's part of the samples, its weight), where all processes run the batch together.

        A process without a sample of its own runs one with weight 0, because every process must take part in the sums.
        """
        own = own_part(self.numbers)
        return replace(self, numbers=tuple(own) or self.numbers[:1]), float(bool(own))

    def not_square(self) -> "list[FoldBatch]":
        """The samples in the fewest batches whose number of samples differs from their number of tokens.

        Then the shape of a layer's values tells which axis counts samples. For a single sample it does not matter.
        """
        cuts = (list(self.pieces(most)) for most in range(len(self), 0, -1))
        return next(cut for cut in cuts if not any(1 < len(piece) in self.lengths.values() for piece in cut))


def load_own(batches: Sequence[FoldBatch]) -> Iterator[Batch]:
    """This process's part of the batches, each loaded when it is asked for."""
    return (batch.load() for batch in own_part(batches))


def evenly(batches: Sequence[FoldBatch], most: int, begin: float = 0.5) -> list[FoldBatch]:
    """At most `most` of the batches, evenly spaced. They are sorted by length, and long sequences count as well."""
    count = min(len(batches), most)
    return [batches[int((place + begin) * len(batches) / count)] for place in range(count)]


@dataclass(frozen=True)
class Folds:
    """The samples in batches: folds for the fit, and a part that is held out. They are the same on every process."""

    samples: Samples
    folds: tuple[tuple[FoldBatch, ...], ...]  # a single fold without cross-validation
    held_out: tuple[FoldBatch, ...]  # for the distance that is reported; () under 64 rows
    choosing: tuple[FoldBatch, ...]  # for the choice of a network; equal to `held_out` where few are held out

    @property
    def fitted(self) -> tuple[FoldBatch, ...]:
        """The batches of all folds."""
        return tuple(itertools.chain(*self.folds))

    @property
    def held_out_samples(self) -> int:
        """The number of samples that nothing is fitted on."""
        return len(self.samples.keys) - sum(map(len, self.fitted))

    @property
    def rows(self) -> int:
        """The number of distinct rows, held out or not."""
        return sum(self.samples.rows)

    @property
    def first(self) -> FoldBatch:
        """The first batch that is fitted on."""
        return self.folds[0][0]

    @property
    def spread(self) -> tuple[FoldBatch, ...]:
        """Some batches of each fold, with short and with long sequences.

        Each fold gives as many samples as a batch has by default, whatever the `batch_size`.
        """
        batches: list[FoldBatch] = []
        for number, fold in enumerate(self.folds):
            begin = (2 * number + 1) / (2 * len(self.folds))  # so that the folds do not look at the same lengths
            batches += evenly(fold, math.ceil(self.samples.at_once / len(fold[0])), begin)
        return tuple(batches)


class SecondSet:
    """This process's batches of `evaluation_data`, read once; `first` is the first batch of all processes."""

    def __init__(self, model: nn.Module, data: Any, folds: Folds, **read: Any) -> None:
        """`data` and `read` are as for `read_batches`. Raises ValueError where the model does not take the data."""
        batches = read_batches(data, model=model, what="evaluation_data", **read)
        first = next(batches, None)
        if first is None:
            raise nothing_given("evaluation_data")
        every, processes = cut_batches(itertools.chain([first], batches), read.get("batch_size")), known_processes()
        self._batches = itertools.islice(every, processes.process_index, None, processes.num_processes)
        self.first, self._repeated = first, 0
        self._known, self._are_batches = frozenset(folds.samples.keys), folds.samples.are_batches

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            # Among samples of several shapes, the folds know each as a batch of its own.
            pieces = cut_batches([batch], 1) if self._are_batches else [batch]
            known = (replace(piece, is_sample=piece.is_sample or self._are_batches) for piece in pieces)
            self._repeated += sum(key in self._known for piece in known for key in sample_keys(piece))
            yield batch

    def repeated(self) -> int:
        """The number of samples read so far, on all processes, that `data` holds as well; each process must call."""
        return sum(each_has(self._repeated))
