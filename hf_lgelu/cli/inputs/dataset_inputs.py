"""A data set → rows that a model takes, by the kind of input that the model is for."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_lgelu.cli.inputs.input_set import InputSet, ProcessedImages, TensorRows, float_rows, sample_numbers
from hf_lgelu.cli.inputs.texts import (
    FEWEST_SEQUENCES,
    TOKENS,
    context_length,
    encoded_sequences,
    taken_beside,
    text_blocks,
    text_sequences,
    tokenizer_of,
)
from hf_lgelu.cli.named_places import local
from hf_lgelu.export.hub.loading import is_hub_id
from hf_lgelu.models.outputs import is_causal

logger = logging.get_logger(__name__)

_LABELS = ("label", "labels")
_FEATURE_ROWS, _IMAGES = 8192, 1024  # taken where the user names no number
_NOT_ONE_CLASS = ("regression", "multi_label_classification")  # problem types of transformers


@dataclass(frozen=True)
class DatasetName:
    """Which rows: of a folder, file or Hub id a configuration, a split, and columns where they are not plain."""

    name: str
    config: str | None = None
    split: str | None = None
    column: str | None = None
    label_column: str | None = None
    pair_column: str | None = None

    @property
    def description(self) -> str:
        """In words, without the path of what is local."""
        path = local(self.name)
        only_split = path is not None and path.is_file()  # a file has one, and its name says nothing
        parts = [
            self.name if path is None else path.resolve().name,
            self.config,
            f"split {self.split}" if self.split and not only_split else None,
        ]
        return ", ".join(part for part in parts if part)

    @property
    def hub_id(self) -> str | None:
        """The name, if it is to be taken for that of a data set on the Hub."""
        return self.name if is_hub_id(self.name) else None


@dataclass(frozen=True)
class _Asked:
    """What `dataset_rows` was asked for."""

    name: DatasetName
    rows: Any
    model: PreTrainedModel
    source: str
    wanted: int | None
    seed: int
    sequence_length: int | None
    prompt: str


def dataset_rows(
    name: DatasetName,
    rows: Any,
    model: PreTrainedModel,
    source: str,
    *,
    wanted: int | None,
    seed: int,
    sequence_length: int | None = None,
    prompt: str = "",
) -> InputSet:
    """`wanted` of the rows, or as many as are taken by default, as `model` takes them.

    What a row is follows from the model's main input: token ids (texts, blocks of one for a language model), pixels
    (images, by the image processor), features (numeric columns, or one column of lists). Labels go along where they
    are classes of the model, or the tokens of a language model; they are never fitted.

    Args:
        name: for messages and the description.
        rows: a `datasets.Dataset`.
        model: what the inputs are for.
        source: folder or Hub id of its tokenizer or image processor.
        wanted: how many rows, of a running text blocks. None takes 8,192 rows of features, 1,024 images, or sequences
            of together 32,768 tokens, but at least 32: past 32 times the width of a layer no gain was seen.
        seed: of their choice.
        sequence_length: tokens of a block, and the most of a sequence; None takes what the model takes.
        prompt: put before every text.

    Raises ValueError that says what to do where no column fits, several do, or the model takes other inputs.
    """
    reason = why_not_read(model)
    if reason is not None:
        raise ValueError(
            f"inputs for {reason} are not read from a data set here; call hf_lgelu.convert_to_relu(model, data) with "
            "batches as the model takes them"
        )
    if name.label_column is not None and not _is_classifier(model):
        raise ValueError(f"--label_column: scored are a classifier's classes, and {type(model).__name__} gives none")
    if name.pair_column is not None and (model.main_input_name != "input_ids" or is_causal(model)):
        raise ValueError(f"--pair_column: {type(model).__name__} reads no pairs; leave it out")
    missing = [column for column in (name.column, name.pair_column, name.label_column)
               if column is not None and column not in rows.column_names]  # fmt: skip
    if missing:
        raise ValueError(f"{name.description} has no column {missing[0]!r}; {_columns_in_words(rows)}")
    if not len(rows):
        raise ValueError(f"{name.description} has no rows")
    made = _READERS[model.main_input_name](_Asked(name, rows, model, source, wanted, seed, sequence_length, prompt))
    whole = made.whole if isinstance(made, TensorRows) else len(made) == len(rows)
    return InputSet(made, name.description, name.hub_id, whole=whole, dtype=model.dtype)


def why_not_read(model: PreTrainedModel) -> str | None:
    """What a model is whose inputs are not read from a data set here; None of those whose are."""
    if model.main_input_name not in _READERS:
        return f"models whose main input is {model.main_input_name!r}"
    if model.config.is_encoder_decoder:
        return "encoder-decoders"
    if model.main_input_name == "input_ids" and "pixel_values" in inspect.signature(model.forward).parameters:
        return "models of texts and images"
    return None


def _token_rows(asked: _Asked) -> Any:
    name, rows, model, wanted = asked.name, asked.rows, asked.model, asked.wanted
    longest = context_length(model, asked.sequence_length)
    if "input_ids" in rows.column_names and name.column in (None, "input_ids") and name.pair_column is None:
        return encoded_sequences(rows, model, longest, wanted, asked.seed, _labels(asked))
    texts = rows[_column(asked, "text")]
    tokenizer = tokenizer_of(asked.source)
    longest = longest if asked.sequence_length else min(longest, tokenizer.model_max_length)
    if is_causal(model):
        return text_blocks(texts, tokenizer, longest, wanted or max(FEWEST_SEQUENCES, TOKENS // longest), asked.seed)
    seconds = None if name.pair_column is None else rows[name.pair_column]
    return text_sequences(
        texts, tokenizer, longest, wanted, asked.seed, _labels(asked), seconds=seconds, prompt=asked.prompt
    )


def _pixel_rows(asked: _Asked) -> Any:
    rows, model, wanted = asked.rows, asked.model, asked.wanted or _IMAGES
    if "pixel_values" in rows.column_names and asked.name.column in (None, "pixel_values"):
        return _prepared_pixels(rows, model, wanted, asked.seed, _labels(asked))
    mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
    images = ProcessedImages(rows, _column(asked, "image"), asked.source, mode=mode, labels=_labels(asked))
    return Subset(images, sample_numbers(len(images), wanted, asked.seed).tolist())


def _prepared_pixels(rows: Any, model: PreTrainedModel, wanted: int, seed: int, labels: Tensor | None) -> TensorRows:
    """The column pixel_values, (N, C, H, W), as the model takes it, and masks and the like that it takes beside."""
    chosen = sample_numbers(len(rows), wanted, seed).tolist()
    found = rows[chosen]
    pixels = np.stack([np.asarray(image, dtype=np.float32) for image in found["pixel_values"]])
    tensors = {name: torch.tensor(found[name]) for name in taken_beside(model, rows.column_names)}
    tensors["pixel_values"] = torch.from_numpy(pixels)
    if labels is not None:
        tensors["labels"] = labels[chosen]
    return TensorRows(tensors, whole=len(chosen) == len(rows))


def _feature_rows(asked: _Asked) -> Any:
    name, rows, labels = asked.name, asked.rows, _labels(asked)
    own = [column for column in _columns_of(rows, "number") if column not in (*_LABELS, name.label_column)]
    values = rows.with_format("numpy")
    if name.column is None and own and not _columns_of(rows, "list"):
        features = float_rows(np.stack([values[column][:] for column in own], axis=1))
    else:
        features = float_rows(np.stack([np.asarray(row) for row in values[_column(asked, "list")][:]]))
    wanted_features = getattr(asked.model.config, "num_features", features.shape[1])
    if features.shape[1] != wanted_features:
        raise ValueError(
            f"{name.description} has {features.shape[1]} features a row, and the model takes {wanted_features}; keep "
            f"the columns that it was trained on, prepared as they were. {_columns_in_words(rows)}"
        )
    chosen = torch.from_numpy(sample_numbers(len(features), asked.wanted or _FEATURE_ROWS, asked.seed))
    tensors = {"features": features[chosen]}
    whole = len(chosen) == len(features)
    return TensorRows(tensors if labels is None else {**tensors, "labels": labels[chosen]}, whole=whole)


def _column(asked: _Asked, kind: str) -> str:
    """The column that was named, or the only one of that kind.

    Beside words or messages in lists, the only column of text may be an id, or where a row is from.
    """
    name, rows = asked.name, asked.rows
    others = (name.pair_column, name.label_column, *_LABELS)
    found = [column for column in _columns_of(rows, kind) if column not in others]
    chosen = [name.column] if name.column in _columns_of(rows, kind) else []
    if name.column is None and not (kind == "text" and _columns_of(rows, "nested")):
        chosen = found
    if len(chosen) == 1:
        return chosen[0]
    what = "lists of numbers" if kind == "list" else kind
    pairs = ", and of pairs the second with --pair_column" if kind == "text" else ""
    raise ValueError(f"{name.description}: name the column of {what} with --column{pairs}; {_columns_in_words(rows)}")


def _columns_in_words(rows: Any) -> str:
    kinds = {column: _kind(feature) or type(feature).__name__ for column, feature in rows.features.items()}
    return f"its columns are {', '.join(f'{column} ({kind})' for column, kind in kinds.items())}"


def _columns_of(rows: Any, kind: str) -> list[str]:
    return [column for column, feature in rows.features.items() if _kind(feature) == kind]


def _kind(feature: Any) -> str | None:
    """ "text", "image", "number", "list" (of numbers), "nested" (lists or mappings of others), or None."""
    import datasets

    if isinstance(feature, datasets.Image):
        return "image"
    if isinstance(feature, datasets.Value):
        if feature.dtype in ("string", "large_string", "string_view"):
            return "text"
        return "number" if feature.dtype.startswith(("float", "int", "uint", "bool")) else None
    if isinstance(feature, dict | list) or hasattr(feature, "feature"):
        return "list" if _kind(getattr(feature, "feature", None)) == "number" else "nested"
    return None


def _is_classifier(model: PreTrainedModel) -> bool:
    """Whether it gives one class a row."""
    if getattr(model.config, "problem_type", None) in _NOT_ONE_CLASS:
        return False
    ends = ("ForImageClassification", "ForSequenceClassification", "ForClassification", "ClassificationWithTeacher")
    return type(model).__name__.endswith(ends)


def _labels(asked: _Asked) -> Tensor | None:
    """(N,) int64 classes of the model; None where the data set has none, or, with a warning, those of another task.

    Raises ValueError for a column that was asked for by name and holds none.
    """
    name, rows, model = asked.name, asked.rows, asked.model
    column = name.label_column or next((usual for usual in _LABELS if usual in rows.column_names), None)
    if column is None or not _is_classifier(model):
        return None
    values = np.asarray(rows.with_format("numpy")[column][:])
    labels = _as_model_classes(values, getattr(rows.features[column], "names", None), model)
    if labels is None:
        classes = ", ".join(map(str, model.config.id2label.values()))
        reason = (
            f"column {column!r} of {name.description} does not hold the model's classes, by name ({classes[:200]}) or "
            f"number (0 to {model.config.num_labels - 1})"
        )
        if name.label_column is not None:
            raise ValueError(reason)
        logger.warning(f"{reason}: nothing is scored by it")
    return labels


def _as_model_classes(values: np.ndarray, names: Sequence[str] | None, model: PreTrainedModel) -> Tensor | None:
    """By name where both sides have names, else by number; None where a row has no class, or none of the model's.

    Capital or small letters make no other name ("POSITIVE", "positive"), unless two of the model's differ by them.
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
    # Before the names are looked up: a row without a class has -1, which as an index would be the last name.
    if not np.issubdtype(values.dtype, np.integer) or values.min() < 0:
        return None
    if names and not generic:
        known = [plain(name) for name in names]
        if len(known) != len(own) or set(known) != set(own):
            return None
        values = np.array([own[name] for name in known])[values]
    return None if values.max() >= model.config.num_labels else torch.from_numpy(values.astype(np.int64))


_READERS = {"input_ids": _token_rows, "pixel_values": _pixel_rows, "features": _feature_rows}
"""By the model's main input."""
