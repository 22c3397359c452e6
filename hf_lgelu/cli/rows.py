"""Rows that a model takes: images, token ids and other tensors, made of the columns of a data set."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import find_labels

from hf_lgelu.cli.checkpoint import Checkpoint
from hf_lgelu.models.checkpoint import processor_files
from hf_lgelu.networks.masks import pad_tokens
from hf_lgelu.networks.outputs import IGNORED_LABEL, is_causal
from hf_lgelu.networks.run import in_dtype

LONGEST = 1024  # the most tokens of a sequence, if the user names no length

TOKENS, FEWEST_SEQUENCES = 32768, 32
"""If the user names no number, sequences are taken until they have TOKENS together, and at least FEWEST_SEQUENCES."""

_LOADED_TOGETHER = 64  # rows read at a time; fewer may be computed at a time
_TOGETHER = 64  # consecutive texts that stay together, so that most blocks are consecutive text
_CHOICE = 4  # times as many blocks are cut as are wanted, so that many texts have a chosen block


@dataclass(frozen=True)
class InputSet:
    """Rows that a model takes. `description` names their data set in words.

    `rows.__getitems__` gives a batch, {name of an argument: tensor}, with "labels" if they are known. `whole` says that
    no row was left out. Floating-point inputs get the model's `dtype`, because not every network casts them.
    """

    rows: Any
    description: str
    whole: bool = False
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return len(self.rows)

    def batches(self, what: str, *, progress: bool, batch_size: int = _LOADED_TOGETHER) -> Iterable[dict[str, Tensor]]:
        """All rows in order, with a progress bar named `what`."""
        loader = DataLoader(self.rows, batch_size=batch_size, collate_fn=partial(in_dtype, dtype=self.dtype))
        return tqdm(loader, desc=what, unit="batch", disable=not progress)

    def first(self, count: int) -> dict[str, Tensor]:
        """The first rows as a batch, without labels."""
        batch = self.rows.__getitems__(range(min(count, len(self.rows))))
        return in_dtype({name: tensor for name, tensor in batch.items() if name != "labels"}, self.dtype)


class TensorRows(Dataset):
    """N rows of named tensors, such as {"input_ids": (N, T), "attention_mask": (N, T)}.

    `whole` says that no row of the data set was left out, `is_cropped` that a batch ends with its longest sequence.
    """

    def __init__(self, tensors: dict[str, Tensor], *, whole: bool = False, is_cropped: bool = True) -> None:
        self.tensors, self.whole, self._is_cropped = tensors, whole, is_cropped

    @classmethod
    def of_set(cls, tensors: dict[str, Tensor], numbers: Any, labels: Tensor | None, size: int) -> "TensorRows":
        """The rows with these `numbers` of a data set of `size` rows, and their labels, of all (size,) `labels`."""
        with_labels = {} if labels is None else {"labels": labels[numbers]}
        return cls(tensors | with_labels, whole=len(numbers) == size)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The rows `indices` as one batch, padded to its longest sequence."""
        batch = {name: tensor[list(indices)] for name, tensor in self.tensors.items()}
        mask = batch.get("attention_mask")
        if mask is None or mask.ndim != 2 or not mask.any() or not self._is_cropped:
            return batch
        whole, longest = mask.shape[1], int(mask.any(0).nonzero().max()) + 1
        is_sequence = {name: tensor.ndim > 1 and tensor.shape[1] == whole for name, tensor in batch.items()}
        return {name: tensor[:, :longest] if is_sequence[name] else tensor for name, tensor in batch.items()}


class ProcessedImages(Dataset):
    """Images as rows {"pixel_values": (C, H, W)}, with "labels" if they are known, decoded on request.

    The images are a column of a `datasets.Dataset`. The image processor of the model `source` prepares them (for timm's
    models, as `pretrained_cfg` in config.json says). `mode` is PIL's name of a kind of pixel: "RGB", or "L" for grey.
    """

    def __init__(
        self, rows: Any, column: str, source: str, *, mode: str, labels: Tensor | None, trust_remote_code: bool = False
    ) -> None:
        import datasets

        try:
            self.processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"images need the model's image processor, and none can be loaded from {source} ({error}). Save one "
                "there (image_processor.save_pretrained), or call hf_lgelu.convert_to_relu with your own batches"
            ) from error
        self.decode = datasets.Image().decode_example
        self.rows = rows.select_columns(column).cast_column(column, datasets.Image(decode=False))
        self.column, self.mode, self.labels = column, mode, labels

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """The rows `indices` as one batch."""
        numbers, images = list(indices), []
        for number, encoded in zip(numbers, self.rows[numbers][self.column], strict=True):
            try:
                if encoded is None:
                    raise ValueError("it is empty")
                images.append(self.decode(encoded).convert(self.mode))
            except Exception as error:  # PIL has errors of its own, as for too many pixels
                file = f" (file {encoded['path']})" if encoded and encoded.get("path") else ""
                raise ValueError(
                    f"the picture in row {number}, counted from 0{file}, cannot be read ({error}); replace it, or "
                    "leave it out"
                ) from error
        batch = {"pixel_values": self.processor(images, return_tensors="pt")["pixel_values"]}
        return batch if self.labels is None else {**batch, "labels": self.labels[numbers]}


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
            "(tokenizer.save_pretrained), or give a data set that holds a column input_ids"
        ) from error
    return tokenizer


def text_blocks(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, wanted: int | None, seed: int
) -> TensorRows:
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
    whole = wanted is None or count < wanted
    return TensorRows({"input_ids": blocks, "labels": _predicted(blocks)}, whole=whole)


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
) -> TensorRows:
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

    chosen = _taken(encoded(), lambda row: len(row["input_ids"]), wanted)
    tensors = dict(tokenizer.pad(chosen, return_tensors="pt", verbose=False))
    return TensorRows.of_set(tensors, filled[: len(chosen)], labels, len(texts))


def _taken(rows: Iterable[Any], tokens_of: Callable[[Any], int], wanted: int | None) -> list[Any]:
    """The first `wanted` rows; with None, as many as have TOKENS together, and at least FEWEST_SEQUENCES."""
    taken: list[Any] = []
    tokens = 0
    for row in rows:
        if len(taken) == wanted or (wanted is None and tokens >= TOKENS and len(taken) >= FEWEST_SEQUENCES):
            break
        taken.append(row)
        tokens += tokens_of(row)
    return taken


def encoded_sequences(
    rows: Any, model: PreTrainedModel, length: int, wanted: int | None, seed: int, labels: Tensor | None
) -> TensorRows:
    """The columns of a tokenized data set that the model takes, cut at `length` and padded on the right.

    Padding on the left is removed before the cut, which would leave only padding. As many rows are taken as in
    `text_sequences`. The labels of a language model are a column of the data set, or else its tokens, with -100 for
    padding. The labels of another model are `labels`, (len(rows),).
    """
    order = sample_numbers(len(rows), None, seed).tolist()
    has_mask = "attention_mask" in rows.column_names

    def tokens(number: int) -> int:
        row = rows[number]
        return min(length, sum(row["attention_mask"]) if has_mask else len(row["input_ids"]))

    numbers = order[:wanted] if wanted is not None else _taken(order, tokens, None)
    found = rows[numbers]
    sequences = found["input_ids"]
    masks = found["attention_mask"] if has_mask else [[1] * len(ids) for ids in sequences]
    begins = [mask.index(1) if 1 in mask else 0 for mask in masks]
    sizes = [len(ids) for ids in sequences]

    def padded(name: str, column: Sequence[Any], fill: int = 0) -> Tensor:
        """(rows, longest) int64 values of a column that has a value for each token."""
        if [len(row) if isinstance(row, list) else None for row in column] != sizes:
            raise ValueError(
                f"the column {name!r} must have a value for each token of input_ids, as the model takes it"
            )
        cut = [torch.tensor(row[begin : begin + length]) for row, begin in zip(column, begins, strict=True)]
        return nn.utils.rnn.pad_sequence(cut, batch_first=True, padding_value=fill).to(torch.int64)

    ids, mask = padded("input_ids", sequences), padded("attention_mask", masks)
    if "input_ids" in (pad := pad_tokens(model)):
        # A classifier on a decoder looks for the model's own padding token.
        ids = ids.masked_fill(mask == 0, pad["input_ids"])
    tensors = {"input_ids": ids, "attention_mask": mask}
    for name in other_arguments(model, rows.column_names):
        if name != "attention_mask" and any(row is not None for row in found[name]):
            is_of_rows = all(isinstance(row, int) for row in found[name])
            tensors[name] = torch.tensor(found[name]) if is_of_rows else padded(name, found[name])
    if is_causal(model):
        has_labels = "labels" in rows.column_names and any(isinstance(row, list) for row in found["labels"])
        own = padded("labels", found["labels"], IGNORED_LABEL) if has_labels else ids
        tensors["labels"] = _predicted(own).masked_fill(mask == 0, IGNORED_LABEL)
    return TensorRows.of_set(tensors, numbers, labels, len(order))


def other_arguments(model: PreTrainedModel, columns: Sequence[str]) -> list[str]:
    """The columns that are arguments of the model, without the main input and the labels."""
    arguments = inspect.signature(model.forward).parameters.keys() - set(find_labels(type(model)))
    return [name for name in columns if name in arguments and name != model.main_input_name]


def _predicted(tokens: Tensor) -> Tensor:
    """The labels of (N, T) tokens: the tokens themselves, but for the first, which nothing predicts."""
    return torch.cat([torch.full_like(tokens[:, :1], IGNORED_LABEL), tokens[:, 1:]], dim=1)
