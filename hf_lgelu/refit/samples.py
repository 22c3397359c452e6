"""The distinct samples of the data: rows, sequences, images.

A digest of its content identifies a sample. Samples are sorted by digest, so their order is as good as random.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from hf_lgelu.comparing.comparison import OutputComparison
from hf_lgelu.networks.batches import LABELS, TRIED, Batch, nothing_given, sample_keys
from hf_lgelu.networks.masks import frames_of_sound, pad_tokens
from hf_lgelu.networks.outputs import IGNORED_LABEL, OutputReader, is_causal
from hf_lgelu.networks.run import NOT_TAKEN, evaluation_mode, same_randomness, structure_restored
from hf_lgelu.processes import each_has

# The largest change of the outputs by padding, relative to their spread: √ of `OutputComparison.relative_error`.
# Rounding in bfloat16 changes them by 0.01, a wrong position by about 1.
_MOST_CHANGE = 0.1
_TRIED_ALONE = 2  # of the shortest sequences


@dataclass(frozen=True)
class Samples:
    """The distinct samples of the data in the ascending order of their keys, the same on every process.

    Keys are digests of a sample's inputs, without labels and without masked positions.
    """

    batches: Sequence[Batch]  # as they were given; nothing is copied before `take`
    keys: Sequence[bytes]
    rows: Sequence[int]  # of each sample: tokens of a sequence, else 1
    places: Sequence[tuple[int, int]]  # of each sample: number of the batch, row in it
    given: int  # number of samples, with duplicates
    fill: Mapping[str, int] = field(default_factory=dict)  # {name: number that pads its sequences}; 0 for other names
    left: frozenset[str] = frozenset()  # names of the sequences that are padded in front
    is_cropped: bool = False  # whether `take` leaves out the padding that was given

    @property
    def are_batches(self) -> bool:
        """Whether each sample is a batch of its own."""
        return self.batches[0].is_sample

    @property
    def few(self) -> Batch:
        """The first of the given samples, for a look at the model."""
        return self.batches[0][:TRIED]

    @cached_property
    def lengths(self) -> list[dict[str, int]]:
        """{name: length} of each sample's sequences as `take` pads them at least."""
        by_batch: list[dict[str, list[int]]] = []
        for batch in self.batches:
            spans, given = batch.spans, batch.with_labels
            lengths = {
                name: (ends - begins).tolist() if self.is_cropped else [given[name].shape[1]] * len(batch)
                for name, (begins, ends) in spans.items()
            }
            by_batch.append(lengths)
        return [{name: length[row] for name, length in by_batch[batch].items()} for batch, row in self.places]

    @cached_property
    def at_once(self) -> int:
        """The most samples that run together."""
        return min(batch.at_once(is_cropped=self.is_cropped) for batch in self.batches)

    def short_first(self, numbers: Iterable[int]) -> list[int]:
        """The numbers in the order of the samples' lengths."""
        return sorted(numbers, key=lambda number: sum(self.lengths[number].values()))

    def longest(self, numbers: Iterable[int]) -> dict[str, int]:
        """{name: length}, the longest sequences of the samples `numbers`."""
        longest: dict[str, int] = {}
        for number in numbers:
            for name, length in self.lengths[number].items():
                longest[name] = max(longest.get(name, 0), length)
        return longest

    def take(self, numbers: Sequence[int], lengths: Mapping[str, int]) -> Batch:
        """The samples `numbers` as one batch, sequences padded to `lengths`."""
        if self.are_batches:
            return self.batches[self.places[numbers[0]][0]]
        sources: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for position, number in enumerate(numbers):
            batch, row = self.places[number]
            sources[batch].append((position, row))
        taken = {}
        for name, any_value in self.batches[0].with_labels.items():
            length = lengths.get(name)
            shape = any_value.shape[1:] if length is None else (length,)
            taken[name] = out = any_value.new_full((len(numbers), *shape), self.fill.get(name, 0))
            for batch, where in sources.items():
                positions, rows = (list(part) for part in zip(*where, strict=True))
                values = self.batches[batch].with_labels[name][rows]
                if length is None:
                    out[positions] = values
                    continue
                begins, ends = self.batches[batch].spans[name][:, rows].tolist()
                for position, row, begin, end in zip(positions, values, begins, ends, strict=True):
                    kept = row[begin:end] if self.is_cropped else row
                    out[position, slice(length - len(kept), None) if name in self.left else slice(len(kept))] = kept
        return self.batches[0].with_tensors(taken, taken.pop(LABELS, None))


TEXTS, TEXT_TOKENS = 64, 128
"""The number and the length of the texts that a language model samples where no data are given."""


def sampled_text(model: nn.Module, texts: int = TEXTS, at_once: int = TEXTS) -> Tensor:
    """(texts, tokens) that a causal language model samples after its start token, at temperature 1.

    The same model gives the same text for the same `at_once`. Raises ValueError for any other model.
    """
    text: Any = model.config.get_text_config() if isinstance(model, PreTrainedModel) and is_causal(model) else None
    known = (getattr(text, name, None) for name in ("bos_token_id", "eos_token_id"))
    start = next((token for token in known if isinstance(token, int) and token < text.vocab_size), None)
    if start is None or not model.can_generate():
        raise ValueError(
            "give `data`: only a causal language model of transformers with a start token can make its own text, and "
            f"{type(model).__name__} is none"
        )
    length = min(TEXT_TOKENS, getattr(text, "max_position_embeddings", TEXT_TOKENS))
    # The model's own generation config (top_p, a penalty) must not narrow the text.
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        num_beams=1,
        use_cache=True,
        min_new_tokens=length - 1,
        max_new_tokens=length - 1,
        pad_token_id=start,
        eos_token_id=text.eos_token_id,
    )
    found = []
    with evaluation_mode(model), same_randomness():
        for begin in torch.full((texts, 1), start, device=model.device).split(at_once):
            found.append(model.generate(begin, attention_mask=torch.ones_like(begin), generation_config=settings).cpu())
    return torch.cat(found)


def read_samples(batches: Iterable[Batch], *, model: nn.Module | None = None) -> Samples:
    """The distinct samples of batches. Of equal samples the first is kept, with its labels.

    Samples that are nothing but padding are left out. Sequences of different lengths are padded with the token of the
    model's config, on the side of the given padding. If one batch is a sample by itself, all batches are. Samples whose
    shapes differ by more than padding become a batch each.

    Raises ValueError where there are no batches, and where the processes were given different data.
    """
    batches = _alike(batches)
    frames = None if model is None else frames_of_sound(model)
    places: dict[bytes, tuple[int, int]] = {}
    rows: dict[bytes, int] = {}
    for number, batch in enumerate(batches):
        for row, (key, count) in enumerate(zip(sample_keys(batch), batch.row_counts(frames), strict=True)):
            if count and key not in places:
                places[key], rows[key] = (number, row), count
    keys = sorted(places)
    if len(set(each_has(blake2b(b"".join(keys)).digest()))) > 1:
        raise ValueError(
            "the processes were given different data: give each of them all of it, without a sampler that shares it "
            "out. The conversion shares the work out itself"
        )
    if not keys:
        raise nothing_given("data")
    return Samples(
        batches=batches,
        keys=keys,
        rows=[rows[key] for key in keys],
        places=[places[key] for key in keys],
        given=sum(map(len, batches)),
        fill={LABELS: IGNORED_LABEL} | ({} if model is None else pad_tokens(model)),
        left=frozenset(name for batch in batches for name in batch.padded_in_front),
    )


def _alike(batches: Iterable[Batch]) -> list[Batch]:
    """The batches that are not empty. Each is one sample if any of them is, or if shapes differ."""
    batches = [batch for batch in batches if len(batch)]
    if any(batch.is_sample for batch in batches):
        return [replace(batch, is_sample=True) for batch in batches]
    if len({_shapes(batch) for batch in batches}) <= 1:
        return batches
    # Padding cannot give them one shape: images of different sizes, sequences without a mask.
    return [replace(batch[place : place + 1], is_sample=True) for batch in batches for place in range(len(batch))]


def _shapes(batch: Batch) -> tuple[Any, ...]:
    """The shapes of a sample's tensors that are not padded."""
    tensors = sorted(batch.with_labels.items())
    return tuple(None if name in batch.spans else value.shape[1:] for name, value in tensors)


def choose_padding(samples: Samples, read: OutputReader) -> Samples:
    """The samples without the padding that was given, where that changes no output; otherwise as they were given.

    A few of the shortest samples run alone, as they were given, and then together: without padding of their own, padded
    to the longest of the few, and to the longest of all. Tokenizers may have padded them to the model's limit.

    Raises ValueError where the lengths differ, and padding to the longest changes the outputs.
    """
    cropped, every = replace(samples, is_cropped=True), range(len(samples.keys))
    whole = samples.longest(every)
    is_padded, is_uneven = cropped.lengths != samples.lengths, any(each != whole for each in samples.lengths)
    if not is_padded and not is_uneven:
        return samples
    few = cropped.short_first(every)[:_TRIED_ALONE]
    with structure_restored(read.model) as is_another:
        try:
            alone = [rows for number in few for rows in _rows_of(read, samples.take([number], samples.lengths[number]))]
        except NOT_TAKEN:
            return samples  # refused elsewhere
        lengths = (cropped.longest(few), cropped.longest(every)) if is_padded else ()
        changes = [_change(read, alone, cropped.take(few, longest)) for longest in lengths]
        if is_padded and all(change <= _MOST_CHANGE for change in changes) and not is_another():
            return cropped
        change = _change(read, alone, samples.take(few, whole)) if is_uneven else 0.0
    if change > _MOST_CHANGE:
        raise ValueError(
            f"{type(read.model).__name__} gives something else for a sequence that is padded to "
            f"{max(whole.values())}, the longest of the data: outputs change by {change:.2g} of their spread, though "
            "an attention mask hides the padding. Give sequences of one length, padded as they are where the model is "
            "used, or some with padding on the side where the model bears it"
        )
    return samples


def _rows_of(read: OutputReader, batch: Batch) -> list[dict[str, Tensor]]:
    """{name: (rows, columns)} of each sample's outputs in float64, without padding."""
    outputs, found = read(batch.inputs), []
    for number in range(len(batch)):
        one, rows = slice(number, number + 1), {}
        for name, value in outputs.tensors.items():
            rows[name] = batch[one].without_padding(value[one], name, -1).double()
            if outputs.has_classes(name):
                # A number added to all classes changes no prediction, and may be larger than all other changes.
                rows[name] -= rows[name].mean(-1, keepdim=True)
        found.append(rows)
    return found


def _change(read: OutputReader, alone: Sequence[dict[str, Tensor]], together: Batch) -> float:
    """The largest change of an output from the samples `alone` to the same samples `together`, relative to its spread.

    NaN where no output changes too much, and some could not be compared.
    """
    comparisons: dict[str, OutputComparison] = defaultdict(OutputComparison)
    all_compared = True
    try:
        others = _rows_of(read, together)
    except NOT_TAKEN:
        return math.inf
    for given, other in zip(alone, others, strict=True):
        for name, rows in given.items():
            least = min(len(rows), len(other[name]))
            # Padding may add a frame to a sound; rows that are not tokens cannot be compared.
            if abs(len(rows) - len(other[name])) <= 1 and rows.shape[1:] == other[name].shape[1:]:
                known = rows[:least].isfinite()
                comparisons[name].add(rows[:least].where(known, 0.0), other[name][:least].where(known, 0.0))
            else:
                all_compared = False
    errors = [each.relative_error for each in comparisons.values()]
    change = math.sqrt(max(errors, default=0.0)) if all(map(math.isfinite, errors)) else math.inf
    return change if all_compared or change > _MOST_CHANGE else math.nan
