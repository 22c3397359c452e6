"""The rows, columns and labels of a data set that a command's arguments name, as a model takes them."""

import inspect
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_lgelu.cli.checkpoint import Checkpoint
from hf_lgelu.cli.data import Rows
from hf_lgelu.cli.rows import (
    FEWEST_SEQUENCES,
    TOKENS,
    InputSet,
    context_length,
    pictures,
    sample_numbers,
    text_blocks,
    text_sequences,
    tokenizer_of,
)
from hf_lgelu.networks.batches import TRIED
from hf_lgelu.networks.outputs import is_causal
from hf_lgelu.networks.run import require_taken

logger = logging.get_logger(__name__)

_LABELS = ("label", "labels")
_FEATURE_ROWS, _IMAGES = 8192, 1024  # if the user names no number
_NOT_ONE_CLASS = ("regression", "multi_label_classification")  # problem types of transformers


def read_rows(data: Rows, checkpoint: Checkpoint) -> InputSet:
    """The rows as inputs of a model, made by the checkpoint's tokenizer or image processor.

    The model's main input says what a row is. Token ids are a text, or for a language model a block of text. Pixels
    are an image. Features are numeric columns, or one column of lists. Labels are classes of the model, or the
    tokens of a language model; they are never fitted.
    """
    model = checkpoint.model
    main = model.main_input_name
    takes_pixels = "pixel_values" in inspect.signature(model.forward).parameters
    if main not in _READERS or model.config.is_encoder_decoder or (main == "input_ids" and takes_pixels):
        raise ValueError(
            f"inputs for {type(model).__name__} are not read from a data set, but those of models of texts, images or "
            "features; call hf_lgelu.convert_to_relu(model, data) in Python, with batches that the model takes"
        )
    if data.asked.label_column is not None and not _is_classified(checkpoint.model):
        raise ValueError(f"--label_column scores the classes of a classifier, and {type(model).__name__} gives none")
    if data.asked.pair_column is not None and (main != "input_ids" or is_causal(model)):
        raise ValueError(f"--pair_column: {type(model).__name__} reads no pairs; leave this out")
    inputs = replace(_READERS[main](data, checkpoint), description=data.description, dtype=model.dtype)
    require_taken(checkpoint.network, inputs.first(TRIED), inputs.description)
    return inputs


def _tokens(data: Rows, checkpoint: Checkpoint) -> InputSet:
    model, seed, asked = checkpoint.model, data.asked.seed, data.asked.sequence_length
    texts, tokenizer = data.rows[_column(data, checkpoint, "text")], tokenizer_of(checkpoint)
    longest = context_length(model, asked)
    longest = longest if asked else min(longest, tokenizer.model_max_length)
    if is_causal(model):
        wanted = data.wanted or max(FEWEST_SEQUENCES, TOKENS // longest)
        return text_blocks(texts, tokenizer, longest, wanted, seed)
    seconds = None if data.asked.pair_column is None else data.rows[data.asked.pair_column]
    labels, prompt = _labels(data, checkpoint), checkpoint.prompt
    return text_sequences(texts, tokenizer, longest, data.wanted, seed, labels, seconds=seconds, prompt=prompt)


def _pixels(data: Rows, checkpoint: Checkpoint) -> InputSet:
    chosen = sample_numbers(len(data.rows), data.wanted or _IMAGES, data.asked.seed).tolist()
    mode = "L" if getattr(checkpoint.model.config, "num_channels", 3) == 1 else "RGB"
    column, labels = _column(data, checkpoint, "image"), _labels(data, checkpoint)
    return pictures(data.rows, column, chosen, checkpoint, mode=mode, labels=labels)


def _features(data: Rows, checkpoint: Checkpoint) -> InputSet:
    labels, values = _labels(data, checkpoint), data.rows.with_format("numpy")
    numbers = [column for column in data.columns_of("number") if column not in (*_LABELS, data.asked.label_column)]
    if data.asked.column is None and numbers and not data.columns_of("list"):
        stacked = np.stack([values[column][:] for column in numbers], axis=1)
    else:
        stacked = np.stack([np.asarray(row) for row in values[_column(data, checkpoint, "list")][:]])
    features = torch.as_tensor(np.asarray(stacked, dtype=np.float32))
    wrong = features.isfinite().logical_not().nonzero()
    if len(wrong):
        places = ", ".join(map(str, wrong[:, 1].unique().tolist()))
        raise ValueError(
            f"features must be finite numbers: {len(wrong)} of {features.numel():,} are not, in feature {places} "
            "(counted from 0). Leave these rows out, or fill them as in the model's training"
        )
    expected = getattr(checkpoint.model.config, "num_features", features.shape[1])
    if features.shape[1] != expected:
        raise ValueError(
            f"{data.description} has {features.shape[1]} features a row, and the model takes {expected}; give the "
            f"columns of the model's training, prepared in the same way. {data.columns_in_words}"
        )
    chosen = torch.from_numpy(sample_numbers(len(features), data.wanted or _FEATURE_ROWS, data.asked.seed))
    tensors = {"features": features[chosen]} | ({} if labels is None else {"labels": labels[chosen]})
    return InputSet.of_tensors(tensors, len(chosen) == len(features))


_READERS = {"input_ids": _tokens, "pixel_values": _pixels, "features": _features}


def _column(data: Rows, checkpoint: Checkpoint, kind: str) -> str:
    """The column that was named, or the only one of that kind."""
    asked, others = data.asked.column, (data.asked.pair_column, data.asked.label_column, *_LABELS)
    found = [column for column in data.columns_of(kind) if column == asked or (not asked and column not in others)]
    # Beside words or messages in lists, the only column of text may be an id.
    is_certain = asked or kind != "text" or not data.columns_of("nested")
    if len(found) == 1 and is_certain:
        return found[0]
    of_lists = "lists of numbers" if asked or found else "numbers"
    what = of_lists if kind == "list" else kind
    pairs = ", and of pairs the second with --pair_column" if kind == "text" else ""
    reason = f": name the column of {what} with --column{pairs}"
    if not found:
        named = f" named {asked!r}" if asked else ""
        reason = f" has no column of {what}{named}, which {type(checkpoint.model).__name__} takes"
    raise ValueError(f"{data.description}{reason}; {data.columns_in_words}")


def _is_classified(model: PreTrainedModel) -> bool:
    """Whether the model gives one class a row."""
    if getattr(model.config, "problem_type", None) in _NOT_ONE_CLASS:
        return False
    ends = ("ForImageClassification", "ForSequenceClassification", "ForClassification", "ClassificationWithTeacher")
    return type(model).__name__.endswith(ends)


def _labels(data: Rows, checkpoint: Checkpoint) -> Tensor | None:
    """(N,) int64 classes of the model. None without a column of labels, and with a warning for other classes.

    Raises ValueError if a column that was asked for by name does not hold the model's classes.
    """
    usual = (name for name in _LABELS if name in data.rows.column_names)
    column = data.asked.label_column or next(usual, None)
    if column is None or not _is_classified(checkpoint.model):
        return None
    values = np.asarray(data.rows.with_format("numpy")[column][:])
    labels = _as_model_classes(values, getattr(data.rows.features[column], "names", None), checkpoint.model)
    if labels is None:
        classes = ", ".join(map(str, checkpoint.model.config.id2label.values()))
        reason = (
            f"the column {column!r} of {data.description} does not hold the model's classes, by name "
            f"({classes[:200]}) or number (0 to {checkpoint.model.config.num_labels - 1})"
        )
        if data.asked.label_column is not None:
            raise ValueError(reason)
        logger.warning(f"{reason}: there will be no score")
    return labels


def _as_model_classes(values: np.ndarray, names: Sequence[str] | None, model: PreTrainedModel) -> Tensor | None:
    """(N,) int64 classes of the model; None if a row has no class, or another class than the model's.

    Classes are matched by name if both sides have names, else by number. "POSITIVE" and "positive" are one name, unless
    two names of the model differ only in capital letters.
    """
    labels = {str(label): number for label, number in (model.config.label2id or {}).items()}
    generic = all(label.startswith("LABEL_") for label in labels)
    plain = str.casefold if len({label.casefold() for label in labels}) == len(labels) else str
    own = {plain(label): number for label, number in labels.items()}
    if values.dtype.kind in "UOT":  # texts
        texts = values.tolist()
        if not all(isinstance(text, str) and plain(text) in own for text in texts):
            return None
        values = np.array([own[plain(text)] for text in texts])
    if names and len(names) != model.config.num_labels:  # for example, names of folders that are splits
        return None
    # A row without a class has -1, which as an index would be the last name.
    if not np.issubdtype(values.dtype, np.integer) or values.min() < 0:
        return None
    if names and not generic:
        known = [plain(name) for name in names]
        if len(known) != len(own) or set(known) != set(own):
            return None
        values = np.array([own[name] for name in known])[values]
    return None if values.max() >= model.config.num_labels else torch.from_numpy(values.astype(np.int64))
