"""The rows, columns and labels of a data set that a command's arguments name, as a model takes them."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_lgelu.cli.checkpoint import Checkpoint
from hf_lgelu.cli.data import Rows
from hf_lgelu.models.checkpoint import processor_files
from hf_lgelu.networks.batches import TRIED
from hf_lgelu.networks.outputs import IGNORED_LABEL, is_causal
from hf_lgelu.networks.run import in_dtype, require_taken

logger = logging.get_logger(__name__)

LONGEST = 1024  # the most tokens of a sequence, if the user names no length

TOKENS, FEWEST_SEQUENCES = 32768, 32
"""If the user names no number, sequences are taken until they have TOKENS together, and at least FEWEST_SEQUENCES."""

_LOADED_TOGETHER = 64  # rows read at a time; fewer may be computed at a time
_TOGETHER = 64  # consecutive texts that stay together, so that most blocks are consecutive text
_CHOICE = 4  # times as many blocks are cut as are wanted, so that many texts have a chosen block

_LABELS = ("label", "labels")
_FEATURE_ROWS, _IMAGES = 8192, 1024  # if the user names no number
_NOT_ONE_CLASS = ("regression", "multi_label_classification")  # problem types of transformers


@dataclass(frozen=True)
class InputSet:
    """Rows that a model takes. `description` names their data set in words.

    `read(numbers)` gives some of the `count` rows as a batch, {name of an argument: tensor}, with "labels" if they are
    known. `whole` says that no row of the data set was left out. Floating-point inputs get the model's `dtype`, because
    not every network casts them.
    """

    read: Callable[[list[int]], dict[str, Tensor]]
    count: int
    whole: bool
    description: str = ""
    dtype: torch.dtype = torch.float32

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], whole: bool, description: str = "") -> "InputSet":
        """Rows of named tensors, such as {"input_ids": (N, T), "attention_mask": (N, T)}."""
        count = len(next(iter(tensors.values())))
        return cls(lambda rows: {name: tensor[rows] for name, tensor in tensors.items()}, count, whole, description)

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """The rows with these numbers as one batch, for a DataLoader."""
        return in_dtype(self.read(list(numbers)), self.dtype)

    def batches(self, what: str, *, progress: bool, batch_size: int = _LOADED_TOGETHER) -> Iterable[dict[str, Tensor]]:
        """All rows in order, with a progress bar named `what`."""
        loader: DataLoader = DataLoader(cast(Dataset, self), batch_size=batch_size, collate_fn=lambda batch: batch)
        return tqdm(loader, desc=what, unit="batch", disable=not progress)

    def first(self, count: int) -> dict[str, Tensor]:
        """The first rows as a batch, without labels."""
        batch = self.__getitems__(range(min(count, self.count)))
        return {name: tensor for name, tensor in batch.items() if name != "labels"}


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
    """Images, decoded when they are read, and prepared by the checkpoint's image processor.

    For timm's models it prepares them as `pretrained_cfg` in config.json says.
    """
    import datasets

    source = checkpoint.name
    try:
        processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=checkpoint.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"images need the model's image processor, and none can be loaded from {source} ({error}). Save one "
            "there (image_processor.save_pretrained), or call hf_lgelu.convert_to_relu with your own batches"
        ) from error
    column, labels = _column(data, checkpoint, "image"), _labels(data, checkpoint)
    chosen = sample_numbers(len(data.rows), data.wanted or _IMAGES, data.asked.seed).tolist()
    mode = "L" if getattr(checkpoint.model.config, "num_channels", 3) == 1 else "RGB"
    encoded_rows = data.rows.select_columns(column).cast_column(column, datasets.Image(decode=False))

    def read(wanted: list[int]) -> dict[str, Tensor]:
        numbers, images = [chosen[number] for number in wanted], []
        for number, encoded in zip(numbers, encoded_rows[numbers][column], strict=True):
            try:
                if encoded is None:
                    raise ValueError("it is empty")
                images.append(datasets.Image().decode_example(encoded).convert(mode))
            except Exception as error:  # PIL has errors of its own, as for too many pixels
                file = f" (file {encoded['path']})" if encoded and encoded.get("path") else ""
                raise ValueError(
                    f"the picture in row {number}, counted from 0{file}, cannot be read ({error}); replace it, or "
                    "leave it out"
                ) from error
        batch = {"pixel_values": processor(images, return_tensors="pt")["pixel_values"]}
        return batch if labels is None else {**batch, "labels": labels[numbers]}

    return InputSet(read, len(chosen), whole=len(chosen) == len(data.rows))


def _features(data: Rows, checkpoint: Checkpoint) -> InputSet:
    labels, values = _labels(data, checkpoint), data.rows.with_format("numpy")
    of_labels = (*_LABELS, data.asked.label_column)
    numbers = [column for column in data.columns_of("number") if column not in of_labels]
    if data.asked.column is None and numbers and not data.columns_of("list"):
        others = [column for column in data.rows.column_names if column not in (*numbers, *of_labels)]
        left_out = (
            f"; without numbers, and left out: {', '.join(others[:8])}{', …' * (len(others) > 8)}" if others else ""
        )
        if len(numbers) != (wanted := getattr(checkpoint.model.config, "num_features", len(numbers))):
            raise ValueError(
                f"{data.description} has {len(numbers)} columns of numbers, and the model takes {wanted} features"
                f"{left_out}. Give the columns that it was trained on, in that order, and name the column of classes "
                "with --label_column"
            )
        if others:
            logger.warning(f"{len(numbers)} columns of {data.description} are the features{left_out}")
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


def sample_numbers(available: int, wanted: int | None, seed: int) -> np.ndarray:
    """`wanted` different row numbers below `available`, in the order of a seeded permutation; None takes all.

    Every version of numpy gives the same numbers. A larger sample with the same seed begins with them.
    """
    numbers = np.random.RandomState(seed).permutation(available)
    return numbers if wanted is None else numbers[:wanted]


def context_length(model: PreTrainedModel, wanted: int | None) -> int:
    """Tokens of a sequence: `wanted`, or what the model takes, at most LONGEST. ValueError for more than it takes."""
    names = ("n_positions", "max_position_embeddings")
    sizes = (getattr(model.config, name, None) for name in names)
    own = next((size for size in sizes if size and size > 0), None)  # XLNet says -1 for no limit
    if own is not None:  # less the positions that no token has: RoBERTa's begin behind that of padding
        tables = [module for name, module in model.named_modules() if "position" in name.rpartition(".")[2]]
        learned = [table for table in tables if isinstance(table, nn.Embedding) and len(table.weight) == own]
        own -= max((table.padding_idx + 1 for table in learned if table.padding_idx is not None), default=0)
    if wanted is None:
        return min(own or LONGEST, LONGEST)
    if wanted < 2 or (own is not None and wanted > own):
        raise ValueError(f"--sequence_length must be from 2 to {own or 'what the model takes'}, got {wanted}")
    return wanted


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The tokenizer beside a checkpoint. Raises ValueError if there is none."""
    if checkpoint.is_of_sentences:
        return checkpoint.network.tokenizer
    model = checkpoint.name
    try:
        if Path(model).is_dir() and not processor_files(Path(model)):
            raise ValueError("the folder has no file of one")
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=checkpoint.trust_remote_code)
        # transformers may make one of only special tokens: every text is then unknown or empty.
        words = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys() - set(tokenizer.all_special_tokens)
        if len(words) < 2:  # T5's keeps a space
            raise ValueError(f"{type(tokenizer).__name__} has no vocabulary there but special tokens")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # what a damaged one ends in
        raise ValueError(
            f"texts need the model's tokenizer, and none can be loaded from {model} ({error}). Save it there "
            "(tokenizer.save_pretrained), or call hf_lgelu.convert_to_relu with your own batches"
        ) from error
    return tokenizer


def text_blocks(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, wanted: int | None, seed: int
) -> InputSet:
    """`wanted` blocks of `length` tokens, or all; the tokens themselves are the labels, and the model shifts them.

    The texts are joined, each with a line's end; what follows the last whole block is dropped. If the tokenizer begins
    a text with a token of its own (Llama, Gemma), every block begins with this token. Of many texts, only as many are
    read as the blocks need, in a seeded order.
    """
    starts = range(0, len(texts), _TOGETHER)
    order = starts if wanted is None else [starts[i] for i in sample_numbers(len(starts), None, seed)]
    first = tokenizer("", return_attention_mask=False, verbose=False)["input_ids"][:1]
    begins = [int(token) for token in first if token == tokenizer.bos_token_id]
    of_text = length - len(begins)
    tokens: list[int] = []
    # In a file, an empty text is an empty line. An empty cell of a table is None.
    are_lines = not any(text.endswith("\n") for text in texts[:_TOGETHER] if text)
    for start in order:
        together = [
            text if text.endswith("\n") else f"{text}\n"
            for text in texts[start : start + _TOGETHER]
            if text or (text == "" and are_lines)
        ]
        if together:
            encoded = tokenizer(together, add_special_tokens=False, return_attention_mask=False, verbose=False)
            tokens += [token for text in encoded["input_ids"] for token in text]
        if wanted is not None and len(tokens) >= _CHOICE * wanted * of_text:
            break
    count = len(tokens) // of_text
    if not count:
        raise ValueError(
            f"the texts have {len(tokens)} tokens, which do not fill one sequence of {length}; give more text, or a "
            "smaller --sequence_length"
        )
    blocks = torch.tensor(tokens[: count * of_text], dtype=torch.int64).view(count, of_text)
    blocks = torch.cat([torch.tensor(begins, dtype=torch.int64).expand(count, len(begins)), blocks], dim=1)
    blocks = blocks[torch.from_numpy(sample_numbers(count, wanted, seed))]
    labels = torch.cat([torch.full_like(blocks[:, :1], IGNORED_LABEL), blocks[:, 1:]], dim=1)  # nothing predicts these
    return InputSet.of_tensors({"input_ids": blocks, "labels": labels}, wanted is None or count < wanted)


def text_sequences(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    wanted: int | None,
    seed: int,
    labels: Tensor | None,
    *,
    seconds: Sequence[str] | None,
    prompt: str,
) -> InputSet:
    """A row for each of `wanted` texts, without empty texts, cut at `length` tokens and padded to the longest row.

    None takes texts until they have TOKENS together, and at least FEWEST_SEQUENCES. `labels` are (len(texts),).
    `seconds` are the second texts of pairs; the longer text of a pair is cut first. `prompt` is put before every text,
    or before the first text of a pair.
    """
    columns = [texts] if seconds is None else [texts, seconds]
    order = sample_numbers(len(texts), None, seed).tolist()
    filled = [number for number in order if all((column[number] or "").strip() for column in columns)]
    if not filled:
        raise ValueError("the texts are empty; give a column or file that has text in it")

    def encoded() -> Iterator[dict[str, list[int]]]:
        for start in range(0, len(filled), _TOGETHER):
            numbers = filled[start : start + _TOGETHER]
            first, *other = [[column[number] for number in numbers] for column in columns]
            prompted = [prompt + text for text in first]
            made = tokenizer(prompted, *other, truncation=True, max_length=length, verbose=False)
            yield from ({name: column[row] for name, column in made.items()} for row in range(len(numbers)))

    chosen: list[dict[str, list[int]]] = []
    tokens = 0
    for row in encoded():
        if len(chosen) == wanted or (wanted is None and tokens >= TOKENS and len(chosen) >= FEWEST_SEQUENCES):
            break
        chosen.append(row)
        tokens += len(row["input_ids"])
    tensors = dict(tokenizer.pad(chosen, return_tensors="pt", verbose=False))
    if labels is not None:
        tensors["labels"] = labels[filled[: len(chosen)]]

    def read(numbers: list[int]) -> dict[str, Tensor]:
        """A batch ends with its longest sequence."""
        rows = {name: tensor[numbers] for name, tensor in tensors.items()}
        if "attention_mask" not in rows:
            return rows
        used = rows["attention_mask"].any(0)
        return {name: tensor[:, used] if tensor.ndim > 1 else tensor for name, tensor in rows.items()}

    return InputSet(read, len(chosen), whole=len(chosen) == len(texts))
