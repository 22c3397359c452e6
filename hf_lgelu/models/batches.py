"""Batches on the CPU, as a model takes them, read from whatever a user may pass as data."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate
from transformers import PreTrainedConfig

from hf_lgelu.models.example_run import NOT_TAKEN, require_plain, run_example
from hf_lgelu.models.outputs import IGNORED_LABEL

LABEL_KEYS = ("labels", "label")
"""Taken out of a mapping of inputs: the refit needs no labels, only the metrics of the report do."""

LABELS = LABEL_KEYS[0]
"""The name of the labels in `Batch.with_labels`; no input has it."""

BARE = ""
"""The name under which `Batch.tensors` lists inputs that are one tensor."""

TRIED = 2
"""Samples that a model is tried on: of one alone it may drop the axis, or a BatchNorm refuse it."""

DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")
"""The inputs of the decoder of an encoder-decoder, without the encoder's output."""

_SOUND_INPUTS = ("input_values", "input_features")
"""The inputs of audio networks, whose first layers make one frame of many steps."""

ROWS_AT_ONCE = 1024
_TOKENS_AT_ONCE = 2048
_IMAGES_AT_ONCE = 32
_LONGEST_FEATURE_ROW = 4096
"""A longer row of floats is a waveform, to be run as an image is."""

_READ_AT_ONCE = 256
_SEQUENCES = ("input_ids", "attention_mask", "decoder_input_ids")
_MASKS = ("attention_mask", "decoder_attention_mask")
_CONSTANTS = (bool, int, float, str, type(None))
_WHAT_TO_PASS = (
    "Pass a tensor or a mapping of tensors whose leading axis counts samples (rows, sequences, images), a dataset, "
    "a DataLoader, or an iterable of batches"
)
_WHAT_TO_DO = (
    "Prepare the inputs first (tokenizer, image processor), drop the columns that the model does not take, "
    "or pass data_collator, which makes a batch of tensors from a list of items"
)


@dataclass(frozen=True)
class Batch:
    """Inputs of a model, on the CPU.

    Args:
        inputs: a tensor, or what the model takes by name. The leading axis of every tensor counts samples.
        labels: one entry per sample, or None.
    """

    inputs: Tensor | dict[str, Any]
    labels: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the inputs by name."""
        if isinstance(self.inputs, Tensor):
            return {BARE: self.inputs}
        return {name: value for name, value in self.inputs.items() if isinstance(value, Tensor)}

    @property
    def constants(self) -> dict[str, Any]:
        """The other inputs, e.g. {"use_cache": False}."""
        if isinstance(self.inputs, Tensor):
            return {}
        return {name: value for name, value in self.inputs.items() if not isinstance(value, Tensor)}

    @property
    def with_labels(self) -> dict[str, Tensor]:
        """The tensors among the inputs, and the labels."""
        return self.tensors if self.labels is None else self.tensors | {LABELS: self.labels}

    @property
    def masks(self) -> dict[str, Tensor]:
        """The attention masks among the inputs, True where a token counts."""
        return {name: self.tensors[name].bool() for name in _MASKS if name in self.tensors}

    def mask_of(self, name: str) -> Tensor | None:
        """The attention mask (B, T) over a tensor of its shape; None where nothing says which entries are padding."""
        decodes = any(given.startswith("decoder_") for given in self.tensors)
        is_decoded = name.startswith("decoder_") or (name == LABELS and decodes)
        mask = self.tensors.get(_MASKS[is_decoded])
        return mask if mask is not None and mask.ndim == 2 and mask.shape == self.with_labels[name].shape else None

    @cached_property
    def spans(self) -> dict[str, Tensor]:
        """{name of a sequence: (2, B), where each of its rows begins and ends without padding in front and behind}.

        Sequences are tensors with a mask, and labels of tokens. Rows keep all of their width where something without
        the mask's shape is as long: boxes (B, T, 4) or embeddings (B, T, C) go with the tokens.
        """
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

    def at_once(self, *, is_cropped: bool = False) -> int:
        """How many samples like these run together by default; `is_cropped` without the padding that they have."""
        tensors = self.tensors
        name = "input_ids" if "input_ids" in tensors else "attention_mask"
        if name in tensors:
            longest = tensors[name][0].numel()
            if is_cropped and name in self.spans:
                begins, ends = self.spans[name][:, tensors["attention_mask"].any(1)]  # the rest is left out
                longest = max((ends - begins).tolist(), default=1)
            most = max(1, _TOKENS_AT_ONCE // max(1, longest))
            others = [value for given, value in tensors.items() if given != "input_ids"]
            return min(most, _IMAGES_AT_ONCE) if any(value.ndim > 2 for value in others) else most
        short = all(value.ndim <= 2 and value[0].numel() <= _LONGEST_FEATURE_ROW for value in tensors.values())
        some_float = any(value.is_floating_point() for value in tensors.values())
        return ROWS_AT_ONCE if short and some_float else _IMAGES_AT_ONCE

    def counted(self, values: Tensor, part: str, *, channels_last: bool = False) -> Tensor | None:
        """`counted_rows` of these inputs."""
        return counted_rows(self.tensors, values, part, channels_last=channels_last)

    def without_padding(self, values: Tensor, part: str, channel_axis: int | None = None) -> Tensor:
        """The `counted` rows of `values`, (n, channels); the last axis is that of the channels where none is given."""
        values = values if channel_axis is None else values.movedim(channel_axis, -1)
        counted = self.counted(values, part, channels_last=channel_axis is not None)
        return values.reshape(-1, values.shape[-1]) if counted is None else values[counted]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, numbers: slice | Tensor) -> "Batch":
        """Some of its samples; a slice makes views."""
        labels = None if self.labels is None else self.labels[numbers]
        if isinstance(self.inputs, Tensor):
            return Batch(self.inputs[numbers], labels)
        return Batch(self.inputs | {name: value[numbers] for name, value in self.tensors.items()}, labels)


def read_batches(
    data: Any,
    *,
    batch_size: int | None = None,
    data_collator: Callable[[Any], Any] | None = None,
    max_samples: int | None = None,
) -> Iterator[Batch]:
    """The data as batches, each read once.

    Args:
        data: a tensor or a mapping of tensors with all samples; a DataLoader or any other iterable of batches (tensor,
            mapping of tensors, `(inputs, labels)`); a dataset, whose items are collated.
        batch_size: samples read at a time from a dataset (256 by default); nothing else depends on it.
        data_collator: makes a batch of a list of a dataset's items; by default numbers, tensors and lists of equal
            length become tensors.
        max_samples: at most so many: evenly spaced ones of a tensor or a dataset with a length, because files are often
            sorted by class, and the first ones of an iterable.

    Raises:
        TypeError: something is neither a tensor nor a plain constant.
        ValueError: axes that do not agree, items that cannot be stacked, or data_collator without a dataset.
    """
    if isinstance(data, Tensor | np.ndarray | Mapping):
        _reject_collator(data_collator, data)
        whole = _batch(data)
        numbers = _evenly_spaced(len(whole), max_samples)
        return iter([whole if len(numbers) == len(whole) else whole[torch.tensor(numbers)]])
    return _first(_raw_batches(data, batch_size, data_collator, max_samples), max_samples)


def _first(given: Iterable, left: int | None) -> Iterator[Batch]:
    """The first `left` samples, as batches; no batch is asked for beyond these."""
    for raw in given:
        batch = _batch(raw)[slice(left)]
        yield batch
        left = None if left is None else left - len(batch)
        if left == 0:
            return


def _raw_batches(
    data: Any, batch_size: int | None, data_collator: Callable | None, max_samples: int | None
) -> Iterable:
    """Batches as the user's objects give them."""
    if hasattr(data, "iloc"):  # of pandas: its items are columns
        raise TypeError(f"{type(data).__name__} is a table: pass its numbers as a tensor, torch.tensor(frame.values)")
    # A generator of its own keeps the DataLoader from drawing from torch's global one.
    options = {
        "batch_size": batch_size or _READ_AT_ONCE, "collate_fn": data_collator or _collate,
        "generator": torch.Generator(),
    }  # fmt: skip
    if isinstance(data, IterableDataset):
        return DataLoader(data, **options)
    indexable = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    # A plain list holds batches, unless data_collator says that it holds items.
    if indexable and (data_collator is not None or not isinstance(data, Sequence)):
        return DataLoader(data, sampler=_evenly_spaced(len(data), max_samples), **options)
    _reject_collator(data_collator, data)
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise TypeError(f"{type(data).__name__} cannot be read as data. {_WHAT_TO_PASS}")
    return data


def _reject_collator(data_collator: Callable | None, data: Any) -> None:
    if data_collator is not None:
        raise ValueError(
            f"data_collator makes batches of a dataset's items, but the data are a {type(data).__name__}, which holds "
            "batches; leave data_collator out or pass a dataset"
        )


def _evenly_spaced(available: int, wanted: int | None) -> range | list[int]:
    if wanted is None or wanted >= available:
        return range(available)
    return [number * available // wanted for number in range(wanted)]


def _collate(items: Any) -> Any:
    """`default_collate`, with lists of numbers as tensors; a dataset with `__getitems__` may give a whole batch."""
    if isinstance(items, Mapping | Tensor):
        return items
    try:
        return default_collate([_with_tensors(item) for item in items])
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(
            f"the dataset's items, e.g. {_in_short(items[0])}, do not become a batch: {error}. Sequences must have "
            f"equal lengths here. {_WHAT_TO_DO}, e.g. transformers.DataCollatorWithPadding(tokenizer)"
        ) from error


def _with_tensors(value: Any) -> Any:
    """An item whose lists of numbers, however deep, are tensors: `default_collate` would take them for columns."""
    if isinstance(value, Mapping):
        return {name: _with_tensors(entry) for name, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_with_tensors, value))
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    return torch.tensor(value) if isinstance(value, list) and isinstance(first, bool | int | float) else value


def _in_short(item: Any) -> str:
    if isinstance(item, Mapping):
        return "{" + ", ".join(f"{name}: {type(value).__name__}" for name, value in item.items()) + "}"
    return type(item).__name__


def _batch(raw: Any) -> Batch:
    """One batch as the user gave it, checked and on the CPU."""
    inputs, labels = raw, None
    if isinstance(raw, list | tuple):
        if not 1 <= len(raw) <= 2:
            raise ValueError(
                f"a batch that is a {type(raw).__name__} must be (inputs,) or (inputs, labels), got {len(raw)} "
                "entries. Name several inputs in a mapping, as the model's forward names them"
            )
        inputs, labels = (*raw, None)[:2]
    if isinstance(inputs, Mapping):
        inputs = dict(inputs)
        named = [inputs.pop(key) for key in LABEL_KEYS if key in inputs]
        labels = named[0] if labels is None and named else labels
        inputs = {
            str(name): value if isinstance(value, _CONSTANTS) else _tensor(f"input {str(name)!r}", value)
            for name, value in inputs.items()
        }
    else:
        inputs = _tensor("the inputs", inputs)
    batch = Batch(inputs, None if labels is None else _tensor("the labels", labels))
    if not batch.tensors:
        raise ValueError(f"a batch has no tensor among its inputs {sorted(batch.constants)}. {_WHAT_TO_PASS}")
    shapes = {name or "inputs": tuple(value.shape) for name, value in batch.with_labels.items()}
    if any(not shape for shape in shapes.values()) or len({shape[0] for shape in shapes.values()}) > 1:
        raise ValueError(
            f"the leading axis of every tensor of a batch must count its samples, got shapes {shapes}. "
            "Repeat what is shared by all samples, e.g. with expand"
        )
    if any(len(shapes[name]) < 2 for name in _SEQUENCES if name in shapes):
        raise ValueError(
            f"a batch of sequences must have the shape (sequences, tokens), got {shapes}. A list holds batches, not "
            "single items: pass a dataset of them, or data_collator, which makes a batch of a list of items"
        )
    return batch


def _tensor(name: str, value: Any) -> Tensor:
    numeric = isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc")
    if not numeric:
        text = "Text goes through the model's tokenizer first. " if isinstance(value, str) else ""
        raise TypeError(
            f"{name} of a batch must be a tensor, got {_in_short(value)}. {text}{_WHAT_TO_PASS}. {_WHAT_TO_DO}"
        )
    tensor = torch.as_tensor(value)
    require_plain(tensor)
    return tensor.detach().cpu()


def cut_batches(batches: Iterable[Batch], batch_size: int | None = None) -> Iterator[Batch]:
    """The batches in pieces of at most `batch_size` samples, by default those of `Batch.at_once`, as views."""
    for batch in batches:
        size = batch_size or batch.at_once()
        for start in range(0, len(batch), size):
            yield batch[start : start + size]


def for_decoder(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches with the decoder's inputs that an encoder-decoder makes of labels, where they have none.

    The decoder's mask comes with them: labels have different lengths, and nothing predicts their padding.
    """
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    for batch in batches:
        labels = batch.labels
        has_targets = labels is not None and labels.ndim == 2 and "decoder_input_ids" not in batch.tensors
        if make is not None and labels is not None and has_targets:
            bare = isinstance(batch.inputs, Tensor)
            inputs = {model.main_input_name: batch.inputs} if bare else dict(batch.inputs)
            inputs["decoder_input_ids"] = make(labels=labels).cpu()
            if "decoder_attention_mask" in inspect.signature(model.forward).parameters:
                mask = labels.ne(IGNORED_LABEL).long()
                mask[:, 0] = 1  # the token that starts them
                inputs.setdefault("decoder_attention_mask", mask)
            batch = Batch(inputs, labels)
        yield batch


def taken_by(model: nn.Module, batches: Iterable[Batch], what: str) -> Iterator[Batch]:
    """The same batches, without empty ones; the model takes the first of them.

    Args:
        what: names them in messages, "data" or "evaluation_data".

    Raises ValueError where there is no batch, or the model does not take the first; it says what the model said.
    """
    filled = filter(len, batches)
    first = next(filled, None)
    if first is None:
        raise ValueError(
            f"{what} holds no inputs; an iterator gives its batches once, so one that was read before is empty. Pass "
            "a dataset or a DataLoader" + ("" if what == "data" else ", or leave it out")
        )
    few = first[:TRIED]
    try:
        run_example(model, few.inputs)
    except NOT_TAKEN as error:
        given = ", ".join(
            f"{name or 'a tensor'} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
            for name, value in few.tensors.items()
        )
        raise ValueError(
            f"{type(model).__name__} does not take the inputs of {what} ({given}): {error}. Give batches with the "
            "names, shapes and dtypes that the model was trained on"
        ) from error
    return chain([first], filled)


def counted_rows(inputs: Mapping[str, Any], values: Tensor, part: str, *, channels_last: bool = False) -> Tensor | None:
    """The mask of the rows of `values` that are no padding, over all axes but the last; None where all rows count.

    Where the decoder has inputs of its own, the encoder's mask says nothing about the decoder's values, even if both
    sequences are equally long.

    Args:
        inputs: of the model, by name, with its masks.
        values: an output, or the values somewhere inside the network.
        part: the name of the output, or of the module or weight there.
        channels_last: whether the last axis is known to hold channels. Only then can the positions of (B, T, C) be the
            frames of a sound: a convolution has (B, C, T).
    """
    masks: tuple[str, ...] = ("attention_mask", "decoder_attention_mask")
    if any(step.startswith("encoder") for step in part.split(".")):
        masks = masks[:1]
    elif any(given in inputs for given in DECODER_INPUTS):
        masks = masks[1:]
    for mask in (inputs.get(name) for name in masks):
        if isinstance(mask, Tensor):
            counted = mask_over(mask, values.shape[:-1], inputs if channels_last else {})
            if counted is not None:
                return counted.to(values.device)
    return None


def mask_over(mask: Tensor, axes: Sequence[int], inputs: Mapping[str, Any]) -> Tensor | None:
    """The mask (B, T) for positions with these axes: (B, T), or (B, frames) of a sound among the inputs; else None."""
    if mask.shape == tuple(axes):
        return mask.bool()
    return mask_of_frames(mask, axes[1]) if len(axes) == 2 and is_of_sound(mask, inputs) else None


def is_of_sound(mask: Tensor, inputs: Mapping[str, Any]) -> bool:
    """Whether the mask (B, T) belongs to the steps of a sound, (B, T) or (B, T, features)."""
    sounds = (inputs.get(name) for name in _SOUND_INPUTS)
    return any(isinstance(sound, Tensor) and sound.shape[:2] == mask.shape for sound in sounds)


def mask_of_frames(mask: Tensor, frames: int) -> Tensor:
    """The mask (B, frames) made of the mask (B, T) of steps: a frame counts if the last of its steps counts.

    Frames are taken to share the steps evenly. Convolutions without padding make a few frames less, so that the last
    frame of a sound may be missed.
    """
    steps = mask.shape[1]
    last = (torch.arange(1, frames + 1, device=mask.device) * steps - 1) // frames
    return mask[:, last].bool()


def pad_tokens(model: nn.Module) -> dict[str, int]:
    """{input: its padding token} by the model's config.

    A classifier on a decoder reads the last token that is no padding token, whatever the attention mask says.
    """
    configs = (getattr(module, "config", None) for module in model.modules())  # a network of one's own may hold one
    config = next((found for found in configs if isinstance(found, PreTrainedConfig)), None)
    if config is None:
        return {}
    parts = {"input_ids": getattr(config, "encoder", None), "decoder_input_ids": getattr(config, "decoder", None)}
    tokens: dict[str, int | None] = {}
    for name, part in parts.items():
        own = _pad_token(part) if isinstance(part, PreTrainedConfig) else None
        tokens[name] = _pad_token(config) if own is None else own
    return {name: token for name, token in tokens.items() if token is not None}


def _pad_token(config: PreTrainedConfig) -> int | None:
    try:
        text = config.get_text_config()
    except ValueError:  # it has several
        return None
    token, vocabulary = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    token = getattr(config, "pad_token_id", None) if token is None else token
    is_one = isinstance(token, int) and token >= 0 and (not isinstance(vocabulary, int) or token < vocabulary)
    return token if is_one else None


def frames_of_sound(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The function from numbers of steps to numbers of frames of an audio network of transformers; None without one."""
    for module in model.modules():
        count = getattr(module, "_get_feat_extract_output_lengths", None)
        if callable(count):
            # Some give what their convolutions make, and then what remains of it.
            return lambda steps: found[-1] if isinstance(found := count(steps), tuple) else found
    return None
