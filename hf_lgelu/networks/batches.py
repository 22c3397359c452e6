"""Batches on the CPU, in the form that a model takes, read from all forms of user data."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, default_collate

from hf_lgelu.networks.masks import MASKS, counted_rows, is_of_sound
from hf_lgelu.networks.outputs import IGNORED_LABEL, named_tensors
from hf_lgelu.networks.run import NOT_TAKEN, in_words, require_plain, require_taken, run_example

LABELS = "labels"
"""The name of the labels in `Batch.with_labels`; no input has it."""

TRIED = 2
"""The number of samples that a model is tried on: with one it may drop the axis, or a BatchNorm may refuse it."""


_ROWS_AT_ONCE = 1024
_TOKENS_AT_ONCE = 2048
_IMAGES_AT_ONCE = 32
_LONGEST_FEATURE_ROW = 4096  # a longer row of floats is a waveform, which runs in batches of image size
_READ_AT_ONCE = 256
_KEY_BYTES = 16
_SEQUENCES = ("input_ids", "attention_mask", "decoder_input_ids")
_CONSTANTS = (bool, int, float, str, type(None))
_PAIR, _POSITIONS, _ARGUMENT = "(inputs, labels)", "positional arguments", "one argument"
_WHAT_TO_PASS = (
    "Pass tensors with an entry a sample, a mapping of them, a dataset, a DataLoader or an iterable of batches. A "
    "tokenizer or image processor makes tensors by return_tensors='pt', data_collator makes a batch of a list of "
    "items. An object, such as a graph, is passed as its tensors, to a module that makes the object of them"
)


@dataclass(frozen=True)
class Batch:
    """Inputs of one call of the model, on the CPU: a tensor, named arguments, or positional arguments.

    The leading axis of every tensor counts samples, and labels have an entry for each. `is_sample` says that the batch
    is a single sample instead (a graph, a list of graphs), with tensors of any axes.
    """

    inputs: Tensor | dict[str, Any] | tuple[Any, ...]
    labels: Tensor | None = None
    is_sample: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the inputs by name; a tensor deeper inside is "graph.nodes"."""
        return {name: value for name, value in _leaves(self.inputs).items() if isinstance(value, Tensor)}

    @property
    def constants(self) -> dict[str, Any]:
        """The inputs that are no tensors, e.g. {"use_cache": False}."""
        return {name: value for name, value in _leaves(self.inputs).items() if not isinstance(value, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor], labels: Tensor | None) -> "Batch":
        """A batch of the same form with other tensors and labels."""
        values = [tensors.get(name, value) for name, value in _leaves(self.inputs).items()]
        return replace(self, inputs=pytree.tree_unflatten(values, pytree.tree_structure(self.inputs)), labels=labels)

    @property
    def with_labels(self) -> dict[str, Tensor]:
        """The tensors among the inputs, and the labels."""
        return self.tensors if self.labels is None else self.tensors | {LABELS: self.labels}

    @property
    def parts(self) -> frozenset[str]:
        """The names, dtypes and numbers of axes of the tensors, and the constants; a single sample has no parts."""
        if self.is_sample:
            return frozenset()
        constants = {f"{name} = {value!r}" for name, value in self.constants.items()}
        return frozenset(constants).union(
            f"{name or 'inputs'}: {str(value.dtype).removeprefix('torch.')}, {value.ndim}-dimensional"
            for name, value in self.with_labels.items()
        )

    def mask_of(self, name: str) -> Tensor | None:
        """The attention mask (B, T) over the tensor `name` of the same shape; None if there is no such mask."""
        decodes = any(given.startswith("decoder_") for given in self.tensors)
        is_decoded = name.startswith("decoder_") or (name == LABELS and decodes)
        mask = self.tensors.get(MASKS[is_decoded])
        return mask if mask is not None and mask.ndim == 2 and mask.shape == self.with_labels[name].shape else None

    @cached_property
    def spans(self) -> dict[str, Tensor]:
        """{name of a sequence: (2, B), the begin and the end of each row without padding on its sides}.

        Rows keep their whole width if a tensor without the mask's shape is as long: boxes (B, T, 4) or embeddings (B,
        T, C) belong to the tokens.
        """
        if self.is_sample:
            return {}
        masks = {name: self.mask_of(name) for name in self.with_labels}
        beside = [size for name, value in self.tensors.items() if masks[name] is None for size in value.shape[1:]]
        found = {}
        for name, value in self.with_labels.items():
            mask, is_label = masks[name], name == LABELS
            if value.ndim != 2 or (value.is_floating_point() if is_label else mask is None):
                continue
            width = value.shape[1]
            found[name] = torch.tensor([[0], [width]]).expand(2, len(self))
            if mask is not None and width and width not in beside:
                counted = mask.ne(0).to(torch.uint8)
                found[name] = torch.stack([counted.argmax(1), width - counted.flip(1).argmax(1)])
        return found

    @property
    def padded_in_front(self) -> frozenset[str]:
        """The names of the sequences of which a row begins with padding and ends without."""
        found = ((name, self.mask_of(name)) for name in self.spans)
        masks = {name: mask for name, mask in found if mask is not None}
        return frozenset(name for name, mask in masks.items() if ((mask[:, :1] == 0) & (mask[:, -1:] != 0)).any())

    def row_counts(self, frames: Callable[[Tensor], Tensor] | None = None) -> list[int]:
        """The rows of each sample: tokens of a sequence, `frames` (or steps) of a sound, 1 for any other sample."""
        if self.is_sample:
            return [1]
        mask, tokens = self.tensors.get("attention_mask"), self.tensors.get("input_ids")
        if mask is not None and mask.ndim == 2:
            counts = mask.count_nonzero(1)
            if is_of_sound(mask, self.tensors):
                counts = counts if frames is None else frames(counts).clamp(min=0)
            return counts.tolist()
        return [1 if tokens is None else tokens[0].numel()] * len(self)

    def at_once(self, *, is_cropped: bool = False) -> int:
        """The number of samples that run together by default; `is_cropped` leaves out the padding in the batch."""
        if self.is_sample:
            return 1
        tensors = self.tensors
        name = "input_ids" if "input_ids" in tensors else "attention_mask"
        if name in tensors:
            longest = tensors[name][0].numel()
            if is_cropped and name in self.spans:
                begins, ends = self.spans[name][:, tensors["attention_mask"].any(1)]  # rows of padding are left out
                longest = max((ends - begins).tolist(), default=1)
            most = max(1, _TOKENS_AT_ONCE // max(1, longest))
            others = [value for given, value in tensors.items() if given != "input_ids"]
            return min(most, _IMAGES_AT_ONCE) if any(value.ndim > 2 for value in others) else most
        short = all(value.ndim <= 2 and value[0].numel() <= _LONGEST_FEATURE_ROW for value in tensors.values())
        some_float = any(value.is_floating_point() for value in tensors.values())
        return _ROWS_AT_ONCE if short and some_float else _IMAGES_AT_ONCE

    def counted(self, values: Tensor, part: str, *, channels_last: bool = False) -> Tensor | None:
        """`counted_rows` of these inputs."""
        return counted_rows(self.tensors, values, part, channels_last=channels_last)

    def without_padding(self, values: Tensor, part: str, channel_axis: int | None = None) -> Tensor:
        """The `counted` rows of `values`, (n, channels); without `channel_axis`, channels are on the last axis."""
        values = values if channel_axis is None else values.movedim(channel_axis, -1)
        counted = self.counted(values, part, channels_last=channel_axis is not None)
        return values.reshape(-1, values.shape[-1]) if counted is None else values[counted]

    def __len__(self) -> int:
        return 1 if self.is_sample else len(next(iter(self.tensors.values())))

    def __getitem__(self, numbers: slice | Tensor) -> "Batch":
        """Some samples of the batch; a slice makes views."""
        if self.is_sample:
            return self
        labels = None if self.labels is None else self.labels[numbers]
        return self.with_tensors({name: value[numbers] for name, value in self.tensors.items()}, labels)


def _leaves(inputs: Any) -> dict[str, Any]:
    """{name: leaf} of inputs, in their order."""
    leaves, _ = pytree.tree_flatten_with_path(inputs)
    return {".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): leaf for path, leaf in leaves}


def sample_keys(batch: Batch) -> Iterator[bytes]:
    """A digest of each sample: of its inputs' names, dtypes, shapes and bytes, without masked positions."""
    if batch.is_sample:
        digest = blake2b(f"{pytree.tree_structure(batch.inputs)} {batch.constants}".encode(), digest_size=_KEY_BYTES)
        for value in batch.tensors.values():
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode() + _bytes_of(value))
        yield digest.digest()
        return
    tensors = [(name, value, batch.mask_of(name)) for name, value in sorted(batch.tensors.items())]
    header = [
        (name, str(value.dtype), tuple(value.shape[1:]) if mask is None else None) for name, value, mask in tensors
    ]
    start = blake2b(repr(header).encode(), digest_size=_KEY_BYTES)
    for row in range(len(batch)):
        digest = start.copy()
        for _, value, mask in tensors:
            content = value[row] if mask is None else value[row][mask[row].bool()]
            digest.update(_bytes_of(content))
        yield digest.digest()


def _bytes_of(value: Tensor) -> memoryview:
    return memoryview(value.contiguous().reshape(-1).view(torch.uint8).numpy())


def read_batches(
    data: Any,
    *,
    model: nn.Module | None = None,
    what: str = "data",
    batch_size: int | None = None,
    data_collator: Callable[[Any], Any] | None = None,
    max_samples: int | None = None,
) -> Iterator[Batch]:
    """The data as batches, each read once; none of them is empty.

    A batch is one call of the model: a tensor, or best a mapping by the names of the arguments. Two tensors with one
    leading axis, in a tuple or list, are `(inputs, labels)`. Any other tuple holds positional arguments, and any other
    list is one argument. If the model does not take a batch in this form, the other forms are tried.

    Where all tensors have one leading axis and the model takes a part of it, that axis counts samples. Any other batch
    is one sample: a graph, a list of graphs, images of different sizes.

    Args:
        data: a tensor or a mapping of tensors with all samples; a DataLoader or any other iterable of batches; a
            dataset, whose items are collated.
        model: takes the batches, and decides the form of the first; without a model, only shapes decide. An
            encoder-decoder gets the decoder's inputs that it makes from labels.
        what: names the data in messages, "data" or "evaluation_data".
        batch_size: samples read at a time from a dataset (256 by default); nothing else depends on it.
        data_collator: makes a batch from a list of a dataset's items; by default numbers, tensors and lists of equal
            length become tensors.
        max_samples: the most samples to read. A tensor or a dataset with a length gives evenly spaced samples, because
            files are often sorted by class; an iterable gives its first samples, and no batch beyond these is asked
            for.

    Raises TypeError for a value that is no tensor, no plain constant and no container of these. Raises ValueError for
    a first batch that the model does not take, with the model's message, and for batches that differ in form, names,
    dtypes, numbers of axes or constants.
    """
    if hasattr(data, "iloc"):  # a table of pandas: its items are columns
        raise TypeError(f"{type(data).__name__} is a table: pass its numbers as a tensor, torch.tensor(frame.values)")
    is_all = isinstance(data, Tensor | np.ndarray | Mapping)
    # A generator of its own keeps the DataLoader from drawing from torch's global one.
    options = {
        "batch_size": batch_size or _READ_AT_ONCE,
        "collate_fn": data_collator or _collate,
        "generator": torch.Generator(),
    }
    indexable = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not is_all
    if isinstance(data, IterableDataset):
        every: Iterable = DataLoader(data, **options)
    # A plain list holds batches, unless data_collator says that it holds items.
    elif indexable and (data_collator is not None or not isinstance(data, Sequence)):
        every = DataLoader(data, sampler=_evenly_spaced(len(data), max_samples), **options)
    elif data_collator is not None:
        raise ValueError(
            f"data_collator makes batches of a dataset's items, but the data are a {type(data).__name__}, which holds "
            "batches; leave data_collator out or pass a dataset"
        )
    elif isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise TypeError(f"{type(data).__name__} cannot be read as data. {_WHAT_TO_PASS}")
    else:
        every = [data] if is_all else data
    form, is_sample, left, first = None, False, max_samples, frozenset[str]()
    for raw in every:
        if form is None:
            form, is_sample = _form_of(raw, model, what)
        if form not in _forms(raw):
            raise ValueError(f"batches of {what} differ: the first holds {form}, but one is {in_words(raw)}")
        batch = _batch(raw, form, model)
        batch = replace(batch, is_sample=is_sample or batch.is_sample)
        is_thinned = is_all and left is not None and left < len(batch)
        batch = batch[torch.tensor(_evenly_spaced(len(batch), left)) if is_thinned else slice(left)]
        if not len(batch):
            form = None
            continue
        if first and batch.parts and batch.parts != first:
            one, another = ("; ".join(sorted(parts)) for parts in (first - batch.parts, batch.parts - first))
            raise ValueError(
                f"batches of {what} differ: ({one}) in the first, ({another}) in another. Inputs and labels make one "
                "batch, [(inputs, labels)]"
            )
        first = first or batch.parts
        yield batch
        left = None if left is None else left - len(batch)
        if left == 0:
            return


def _forms(raw: Any) -> list[str]:
    if not isinstance(raw, list | tuple):
        return [_ARGUMENT]
    pair = [_PAIR] if 1 <= len(raw) <= 2 and not isinstance(raw[0], _CONSTANTS) else []
    return [*pair, *([_ARGUMENT, _POSITIONS] if isinstance(raw, list) else [_POSITIONS, _ARGUMENT])]


def _form_of(raw: Any, model: nn.Module | None, what: str) -> tuple[str, bool]:
    """(the likeliest form in which the model takes a batch, whether the batch is one sample in this form)."""
    tries = [(form, is_sample) for form in _forms(raw) for is_sample in (False, True)]
    tries.sort(key=lambda tried: tried == (_PAIR, True))  # the least likely form comes last
    refusals = []
    for form, is_sample in tries:
        batch = _batch(raw, form, model)
        if batch.is_sample and not is_sample:
            continue
        if model is None or not len(batch):
            return form, is_sample
        batch = replace(batch, is_sample=is_sample)
        try:
            output = require_taken(model, batch[:TRIED].inputs, what)
        except ValueError as error:
            refusals.append(error)
            continue
        if is_sample or _counts_samples(model, batch, output):
            return form, is_sample
    raise refusals[0]


def _counts_samples(model: nn.Module, batch: Batch, output: Any) -> bool:
    """Whether another number of samples than gave `output` changes the length of a tensor's leading axis.

    True for a model that takes only one batch size.
    """
    others = TRIED + 1 if len(batch) > TRIED else len(batch) - 1
    if not others:
        return True
    try:
        another = run_example(model, batch[:others].inputs)
    except NOT_TAKEN:
        return True
    sizes, others_sizes = (
        [len(value) for _, value in named_tensors(given) if value.ndim] for given in (output, another)
    )
    return sizes != others_sizes or not sizes


def nothing_given(what: str) -> ValueError:
    """The error for data without a batch."""
    return ValueError(
        f"{what} holds no inputs; an iterator gives its batches once, so one that was read before is empty. Pass "
        "a dataset or a DataLoader" + ("" if what == "data" else ", or leave it out")
    )


def _evenly_spaced(available: int, wanted: int | None) -> range | list[int]:
    if wanted is None or wanted >= available:
        return range(available)
    return [number * available // wanted for number in range(wanted)]


def _collate(items: Any) -> Any:
    """A batch by `default_collate`, with lists of numbers as tensors; items that are already a batch are returned."""
    if isinstance(items, Mapping | Tensor):
        return items
    try:
        return default_collate([_with_tensors(item) for item in items])
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(
            f"the dataset's items, e.g. {in_words(items[0])}, do not become a batch: {error}. Sequences must have "
            "equal lengths here. Give an image processor's or tokenizer's tensors, or a data_collator, such as "
            "DataCollatorWithPadding(tokenizer). Where each item is a call, pass DataLoader(dataset, batch_size=None)"
        ) from error


def _with_tensors(value: Any) -> Any:
    """The item with all lists of numbers, however deep, as tensors: `default_collate` would take them for columns."""
    if isinstance(value, Mapping):
        return {name: _with_tensors(entry) for name, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_with_tensors, value))
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    return torch.tensor(value) if isinstance(value, list) and isinstance(first, bool | int | float) else value


def _batch(raw: Any, form: str, model: nn.Module | None) -> Batch:
    """A batch from the user, in one of its forms, checked and on the CPU."""
    inputs, labels = (*raw, None)[:2] if form == _PAIR else (raw, None)
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
        named = [inputs.pop(key) for key in (LABELS, "label") if key in inputs]
        labels = named[0] if labels is None and named else labels
        inputs = {str(name): _prepared(f"input {str(name)!r}", value) for name, value in inputs.items()}
    elif form == _POSITIONS:
        inputs = tuple(_prepared("the inputs", value) for value in raw)
    elif isinstance(inputs, _CONSTANTS):
        raise _not_read("the inputs", inputs)
    else:
        inputs = _prepared("the inputs", inputs)
        inputs = inputs if isinstance(inputs, Tensor) else (inputs,)
    tensors = Batch(inputs).tensors
    if not tensors:
        raise ValueError(f"a batch has no tensor among its inputs ({in_words(inputs)}). {_WHAT_TO_PASS}")
    if any(value.ndim < 2 for name, value in tensors.items() if name in _SEQUENCES):
        raise ValueError(
            f"a batch of sequences must have the shape (sequences, tokens), got {in_words(inputs)}. A list holds "
            "batches, not single items: pass a dataset of them, or a data_collator"
        )
    counts = {value.shape[:1] for value in tensors.values()}
    is_sample = len(counts) > 1 or torch.Size() in counts
    if isinstance(labels, Tensor | np.ndarray):
        labels = _prepared("the labels", labels)
        is_sample = is_sample or labels.shape[:1] not in counts
    elif labels is not None:
        if not is_sample and all("." not in name for name in tensors):
            raise _not_read("the labels", labels)
        labels, is_sample = None, True  # a list of targets for a list of graphs
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if (
        model is None
        or make is None
        or labels is None
        or labels.ndim != 2
        or isinstance(inputs, tuple)
        or "decoder_input_ids" in tensors
    ):
        return Batch(inputs, labels, is_sample)
    # An encoder-decoder makes the decoder's inputs from labels.
    inputs = dict(inputs) if isinstance(inputs, dict) else {model.main_input_name: inputs}
    inputs["decoder_input_ids"] = make(labels=labels).cpu()
    if "decoder_attention_mask" in inspect.signature(model.forward).parameters:
        mask = labels.ne(IGNORED_LABEL).long()
        mask[:, 0] = 1  # the start token counts
        inputs.setdefault("decoder_attention_mask", mask)
    return Batch(inputs, labels, is_sample)


def _prepared(name: str, value: Any) -> Any:
    """A value with its tensors on the CPU and without gradients, in containers whose tensors torch can replace."""
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc"):
        tensor = torch.as_tensor(value)
        require_plain(tensor)
        return tensor.detach().cpu()
    if isinstance(value, _CONSTANTS):
        return value
    if isinstance(value, Mapping) and pytree.tree_is_leaf(value):
        value = dict(value)
    parts, structure = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if pytree.tree_is_leaf(value) or (parts and isinstance(parts[0], str)):
        raise _not_read(name, value)
    return pytree.tree_unflatten([_prepared(name, part) for part in parts], structure)


def _not_read(name: str, value: Any) -> TypeError:
    given, advice = type(value).__name__ if isinstance(value, np.ndarray) else in_words(value), f". {_WHAT_TO_PASS}"
    if given == "str" or given.endswith(": str"):
        given = "text"
        advice = (
            ": pass tokenizer(texts, padding=True, return_tensors='pt'), or give data_collator (model.preprocess of a "
        )
        advice += "SentenceTransformer)" + ", or leave the column out" * name.startswith("input ")
    return TypeError(f"{name} of a batch must be a tensor, got {given}{advice}")


def cut_batches(batches: Iterable[Batch], batch_size: int | None = None) -> Iterator[Batch]:
    """The batches in pieces of at most `batch_size` samples, by default of `Batch.at_once` samples, as views."""
    for batch in batches:
        size = batch_size or batch.at_once()
        for start in range(0, len(batch), size):
            yield batch[start : start + size]
