"""The rows, columns and labels of a data set that a command's arguments name, as a model takes them."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_lgelu.cli.checkpoint import GivenCheckpoint
from hf_lgelu.cli.data import Rows
from hf_lgelu.cli.rows import (
    FEWEST_SEQUENCES,
    TOKENS,
    InputSet,
    ProcessedImages,
    TensorRows,
    context_length,
    encoded_sequences,
    other_arguments,
    sample_numbers,
    text_blocks,
    text_sequences,
    tokenizer_of,
)
from hf_lgelu.files import is_hub_id
from hf_lgelu.networks.batches import TRIED
from hf_lgelu.networks.outputs import is_causal
from hf_lgelu.networks.run import require_taken
from hf_lgelu.refit.samples import TEXTS, sampled_text

logger = logging.get_logger(__name__)

_LABELS = ("label", "labels")
_FEATURE_ROWS, _IMAGES = 8192, 1024  # if the user names no number
_NOT_ONE_CLASS = ("regression", "multi_label_classification")  # problem types of transformers


def own_text(given: GivenCheckpoint, texts: int | None) -> InputSet:
    """Text that the model samples, for calls without data. Raises ValueError for a model that cannot sample text."""
    text = sampled_text(given.network, texts or TEXTS)
    return InputSet(TensorRows({"input_ids": text}), f"{text.numel():,} tokens that the model sampled itself")


def read_rows(rows: Rows, given: GivenCheckpoint) -> InputSet:
    """The rows as inputs, made by the checkpoint's tokenizer or image processor.

    Raises ValueError for rows that do not fit the model.
    """
    inputs = Selection(**vars(rows), given=given).read()
    require_taken(given.network, inputs.first(TRIED), inputs.description)
    return inputs


def why_not_read(model: PreTrainedModel) -> str | None:
    """The kind of a model whose inputs cannot be read from a data set; None for other models."""
    if model.main_input_name not in ("input_ids", "pixel_values", "features"):
        return f"models whose main input is {model.main_input_name!r}"
    if model.config.is_encoder_decoder:
        return "encoder-decoders"
    if model.main_input_name == "input_ids" and "pixel_values" in inspect.signature(model.forward).parameters:
        return "models of texts and images"
    return None


@dataclass(frozen=True)
class Selection(Rows):
    """The rows and columns of a data set that become the inputs of a model."""

    given: GivenCheckpoint = field(kw_only=True)

    def read(self) -> InputSet:
        """The rows as the model takes them.

        The model's main input says what a row is. Token ids are a text, or for a language model a block of text. Pixels
        are an image. Features are numeric columns, or one column of lists. Labels are classes of the model, or the
        tokens of a language model; they are never fitted.
        """
        model = self.given.model
        main = model.main_input_name
        reason = why_not_read(model)
        if reason is not None:
            raise ValueError(
                f"inputs for {reason} are not read from a data set; call hf_lgelu.convert_to_relu(model, data) in "
                "Python, with batches that the model takes"
            )
        if self.asked.label_column is not None and not self._is_classified:
            raise ValueError(
                f"--label_column scores the classes of a classifier, and {type(model).__name__} gives none"
            )
        if self.asked.pair_column is not None and (main != "input_ids" or is_causal(model)):
            raise ValueError(f"--pair_column: {type(model).__name__} reads no pairs; leave this out")
        made = {"input_ids": self._tokens, "pixel_values": self._pixels, "features": self._features}[main]()
        whole = made.whole if isinstance(made, TensorRows) else len(made) == len(self.rows)
        hub_id = self.name if is_hub_id(self.name) else None
        return InputSet(made, self.description, hub_id, whole=whole, dtype=model.dtype)

    def _tokens(self) -> TensorRows:
        rows, model, seed = self.rows, self.given.model, self.asked.seed
        asked, sentences = self.asked.sequence_length, self.given.sentences
        if asked is None and sentences is not None and sentences.longest is not None:
            asked = min(sentences.longest, context_length(model, None))
        longest = context_length(model, asked)
        pair_column, is_of_tokens = self.asked.pair_column, self.asked.column in (None, "input_ids")
        if "input_ids" in rows.column_names and is_of_tokens and pair_column is None:
            return encoded_sequences(rows, model, longest, self.wanted, seed, self._labels())
        texts = rows[self._column("text")]
        tokenizer = tokenizer_of(self.given.processors, trust_remote_code=self.given.trust_remote_code)
        longest = longest if asked else min(longest, tokenizer.model_max_length)
        if is_causal(model):
            wanted = self.wanted or max(FEWEST_SEQUENCES, TOKENS // longest)
            return text_blocks(texts, tokenizer, longest, wanted, seed)
        prompt = "" if sentences is None else sentences.prompt
        seconds = None if pair_column is None else rows[pair_column]
        return text_sequences(
            texts, tokenizer, longest, self.wanted, seed, self._labels(), seconds=seconds, prompt=prompt
        )

    def _pixels(self) -> TensorRows | Subset:
        rows, model, labels = self.rows, self.given.model, self._labels()
        chosen = sample_numbers(len(rows), self.wanted or _IMAGES, self.asked.seed).tolist()
        if "pixel_values" not in rows.column_names or self.asked.column not in (None, "pixel_values"):
            mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
            images = ProcessedImages(
                rows,
                self._column("image"),
                self.given.processors,
                mode=mode,
                labels=labels,
                trust_remote_code=self.given.trust_remote_code,
            )
            return Subset(images, chosen)
        # (N, C, H, W), and other arguments of the model, such as masks
        found = rows[chosen]
        tensors = {name: torch.tensor(found[name]) for name in other_arguments(model, rows.column_names)}
        pixels = np.stack([np.asarray(image, dtype=np.float32) for image in found["pixel_values"]])
        tensors["pixel_values"] = torch.from_numpy(pixels)
        return TensorRows.of_set(tensors, chosen, labels, len(rows))

    def _features(self) -> TensorRows:
        labels, values = self._labels(), self.rows.with_format("numpy")
        numbers = [column for column in self.columns_of("number") if column not in (*_LABELS, self.asked.label_column)]
        if self.asked.column is None and numbers and not self.columns_of("list"):
            stacked = np.stack([values[column][:] for column in numbers], axis=1)
        else:
            stacked = np.stack([np.asarray(row) for row in values[self._column("list")][:]])
        features = torch.as_tensor(np.asarray(stacked, dtype=np.float32))
        wrong = features.isfinite().logical_not().nonzero()
        if len(wrong):
            places = ", ".join(map(str, wrong[:, 1].unique().tolist()))
            raise ValueError(
                f"features must be finite numbers: {len(wrong)} of {features.numel():,} are not, in feature {places} "
                "(counted from 0). Leave these rows out, or fill them as in the model's training"
            )
        expected = getattr(self.given.model.config, "num_features", features.shape[1])
        if features.shape[1] != expected:
            raise ValueError(
                f"{self.description} has {features.shape[1]} features a row, and the model takes {expected}; give the "
                f"columns of the model's training, prepared in the same way. {self.columns_in_words}"
            )
        chosen = torch.from_numpy(sample_numbers(len(features), self.wanted or _FEATURE_ROWS, self.asked.seed))
        return TensorRows.of_set({"features": features[chosen]}, chosen, labels, len(features))

    def _column(self, kind: str) -> str:
        """The column that was named, or the only one of that kind."""
        asked, others = self.asked.column, (self.asked.pair_column, self.asked.label_column, *_LABELS)
        found = [column for column in self.columns_of(kind) if column == asked or (not asked and column not in others)]
        # Beside words or messages in lists, the only column of text may be an id.
        is_certain = asked or kind != "text" or not self.columns_of("nested")
        if len(found) == 1 and is_certain:
            return found[0]
        of_lists = "lists of numbers" if asked or found else "numbers"
        what = of_lists if kind == "list" else kind
        pairs = ", and of pairs the second with --pair_column" if kind == "text" else ""
        reason = f": name the column of {what} with --column{pairs}"
        if not found:
            named = f" named {asked!r}" if asked else ""
            reason = f" has no column of {what}{named}, which {type(self.given.model).__name__} takes"
        raise ValueError(f"{self.description}{reason}; {self.columns_in_words}")

    @property
    def _is_classified(self) -> bool:
        """Whether the model gives one class a row."""
        if getattr(self.given.model.config, "problem_type", None) in _NOT_ONE_CLASS:
            return False
        ends = ("ForImageClassification", "ForSequenceClassification", "ForClassification", "ClassificationWithTeacher")
        return type(self.given.model).__name__.endswith(ends)

    def _labels(self) -> Tensor | None:
        """(N,) int64 classes of the model. None without a column of labels, and with a warning for other classes.

        Raises ValueError if a column that was asked for by name does not hold the model's classes.
        """
        usual = (name for name in _LABELS if name in self.rows.column_names)
        column = self.asked.label_column or next(usual, None)
        if column is None or not self._is_classified:
            return None
        values = np.asarray(self.rows.with_format("numpy")[column][:])
        labels = _as_model_classes(values, getattr(self.rows.features[column], "names", None), self.given.model)
        if labels is None:
            classes = ", ".join(map(str, self.given.model.config.id2label.values()))
            reason = (
                f"the column {column!r} of {self.description} does not hold the model's classes, by name "
                f"({classes[:200]}) or number (0 to {self.given.model.config.num_labels - 1})"
            )
            if self.asked.label_column is not None:
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
