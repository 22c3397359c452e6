"""Texts as token ids: blocks of a running text for a language model, a sequence each for other models."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import find_labels

from hf_lgelu.cli.inputs.input_set import TensorRows, sample_numbers
from hf_lgelu.models.checkpoint import processor_files
from hf_lgelu.models.outputs import IGNORED_LABEL, is_causal, pad_tokens

LONGEST = 1024
"""Tokens of a sequence where the user names no length and the model takes more."""

TOKENS, FEWEST_SEQUENCES = 32768, 32
"""Where the user names no number: sequences until they have so many tokens together, but at least so many of them."""

_TOGETHER = 64  # consecutive texts that stay together, so that most blocks are a text as it was written
_CHOICE = 4  # times as many blocks are cut as are wanted, so that those chosen are of many texts


def context_length(model: PreTrainedModel, wanted: int | None) -> int:
    """Tokens of a sequence: `wanted`, or what the model takes, at most LONGEST.

    Raises ValueError if the model does not take as many as are wanted.
    """
    names = ("n_positions", "max_position_embeddings")
    sizes = (getattr(model.config, name, None) for name in names)
    own = next((size for size in sizes if size and size > 0), None)  # XLNet says -1 for no limit
    if own is not None:
        own -= _positions_of_padding(model, own)
    if wanted is None:
        return min(own or LONGEST, LONGEST)
    if wanted < 2 or (own is not None and wanted > own):
        raise ValueError(f"--sequence_length must be from 2 to {own or 'what the model takes'}, got {wanted}")
    return wanted


def _positions_of_padding(model: PreTrainedModel, positions: int) -> int:
    """Of so many learned positions those that no token has: RoBERTa's begin behind that of padding."""
    tables = [module for name, module in model.named_modules() if "position" in name.rpartition(".")[2]]
    found = [table for table in tables if isinstance(table, nn.Embedding) and len(table.weight) == positions]
    return max((table.padding_idx + 1 for table in found if table.padding_idx is not None), default=0)


def tokenizer_of(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a checkpoint. Raises ValueError if there is none."""
    folder = Path(model)
    if folder.is_dir() and not processor_files(folder):
        raise _no_tokenizer(model, "the folder has no file of one")
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # what a damaged one ends in
        raise _no_tokenizer(model, str(error)) from error
    # Where no vocabulary is, transformers may make one of special tokens alone: every text is then unknown or empty.
    words = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys() - set(tokenizer.all_special_tokens)
    if len(words) < 2:  # T5's keeps a space
        raise _no_tokenizer(model, f"{type(tokenizer).__name__} has no vocabulary there but special tokens")
    return tokenizer


def _no_tokenizer(model: str, why: str) -> ValueError:
    return ValueError(
        f"texts need the model's tokenizer, and none can be loaded from {model} ({why}). Save it there "
        "(tokenizer.save_pretrained), or give a data set that holds a column input_ids"
    )


def text_blocks(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, wanted: int | None, seed: int
) -> TensorRows:
    """`wanted` blocks of `length` tokens, or all; the tokens themselves are the labels, and the model shifts them.

    The texts follow one another, each with a line's end behind it where it has none; what is left behind the last whole
    block is dropped. Where the tokenizer begins a text with a token of its own (Llama, Gemma), every block begins with
    that, as whatever the model reads does. Of many texts only as many are read as it takes, in a seeded order.

    Raises ValueError if the texts do not fill one block.
    """
    starts = range(0, len(texts), _TOGETHER)
    order = starts if wanted is None else [starts[i] for i in sample_numbers(len(starts), None, seed)]
    begins = _begins_with(tokenizer)
    of_text = length - len(begins)
    tokens: list[int] = []
    are_lines = not any(text.endswith("\n") for text in texts[:_TOGETHER])  # of a file: an empty one is an empty line
    for start in order:
        together = [text if text.endswith("\n") else f"{text}\n" for text in texts[start : start + _TOGETHER]
                    if text or are_lines]  # fmt: skip
        if together:
            encoded = tokenizer(together, add_special_tokens=False, return_attention_mask=False, verbose=False)
            tokens += [token for text in encoded["input_ids"] for token in text]
        if wanted is not None and len(tokens) >= _CHOICE * wanted * of_text:
            break
    count = len(tokens) // of_text
    if not count:
        raise ValueError(
            f"the texts have {len(tokens)} tokens, which do not fill one sequence of {length}; give more of them, or "
            "a smaller --sequence_length"
        )
    blocks = torch.tensor(tokens[: count * of_text], dtype=torch.int64).view(count, of_text)
    blocks = torch.cat([torch.tensor(begins, dtype=torch.int64).expand(count, len(begins)), blocks], dim=1)
    blocks = blocks[torch.from_numpy(sample_numbers(count, wanted, seed))]
    whole = wanted is None or count < wanted
    return TensorRows({"input_ids": blocks, "labels": _predicted(blocks)}, whole=whole)


def _begins_with(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that the tokenizer puts before a text, if it does."""
    first = tokenizer("", return_attention_mask=False, verbose=False)["input_ids"][:1]
    return [int(token) for token in first if token == tokenizer.bos_token_id]


def text_sequences(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    wanted: int | None,
    seed: int,
    labels: Tensor | None = None,
    *,
    seconds: Sequence[str] | None = None,
    prompt: str = "",
) -> TensorRows:
    """`wanted` texts that are not empty, a row each, cut at `length` tokens and padded to the longest.

    None takes them until they have TOKENS together, and FEWEST_SEQUENCES at least. `labels` (len(texts),) go along.
    `seconds` are the other texts of pairs, of which the longer is cut first; `prompt` is put before every text, of
    pairs before the first.

    Raises ValueError without a text, or without a token to pad with.
    """
    if tokenizer.pad_token is None:
        raise ValueError("the tokenizer has no token to pad with; set tokenizer.pad_token and save it beside the model")
    columns = [texts] if seconds is None else [texts, seconds]
    order = sample_numbers(len(texts), None, seed).tolist()
    filled = [number for number in order if all((column[number] or "").strip() for column in columns)]
    if not filled:
        raise ValueError("the column holds no text: every row is empty")

    def encoded() -> Iterator[dict[str, list[int]]]:
        for start in range(0, len(filled), _TOGETHER):
            numbers = filled[start : start + _TOGETHER]
            first, *other = [[column[number] for number in numbers] for column in columns]
            prompted = [prompt + text for text in first]
            made = tokenizer(prompted, *other, truncation=True, max_length=length, verbose=False)
            yield from ({name: column[row] for name, column in made.items()} for row in range(len(numbers)))

    chosen = _taken(encoded(), lambda row: len(row["input_ids"]), wanted)
    tensors = dict(tokenizer.pad(chosen, return_tensors="pt", verbose=False))
    if labels is not None:
        tensors["labels"] = labels[filled[: len(chosen)]]
    return TensorRows(tensors, whole=len(chosen) == len(texts))


def _taken(rows: Iterable[Any], tokens_of: Callable[[Any], int], wanted: int | None) -> list[Any]:
    """The first `wanted` rows; of None as many as have TOKENS together, and FEWEST_SEQUENCES at least."""
    taken: list[Any] = []
    tokens = 0
    for row in rows:
        if len(taken) == wanted or (wanted is None and tokens >= TOKENS and len(taken) >= FEWEST_SEQUENCES):
            break
        taken.append(row)
        tokens += tokens_of(row)
    return taken


def encoded_sequences(
    rows: Any, model: PreTrainedModel, length: int, wanted: int | None, seed: int, labels: Tensor | None = None
) -> TensorRows:
    """The columns of a tokenized data set that the model takes, cut at `length` and padded on the right.

    Of rows that are padded on the left that goes first: cut, they would be padding for the most part. How many are
    taken, as in `text_sequences`. A language model's labels are those of the data set, where it has a column of them,
    else its tokens, -100 where they are padding; another model's are `labels`, (len(rows),).

    Raises ValueError for token numbers that are no integers, or a column that the model takes and that has neither a
    value for each token nor one for each row.
    """
    order = sample_numbers(len(rows), None, seed).tolist()
    has_mask = "attention_mask" in rows.column_names
    numbers = order[:wanted]
    if wanted is None:
        numbers = _taken(order, lambda number: min(length, _tokens(rows[number], has_mask)), None)
    found = rows[numbers]
    sequences = found["input_ids"]
    masks = found["attention_mask"] if has_mask else [[1] * len(ids) for ids in sequences]
    cut = _Cut(numbers, sequences, masks, length)
    ids, mask = cut.padded("input_ids", sequences), cut.padded("attention_mask", masks)
    if "input_ids" in (pad := pad_tokens(model)):
        # A classifier on a decoder looks for the model's own, whatever the rows were padded with.
        ids = ids.masked_fill(mask == 0, pad["input_ids"])
    tensors = {"input_ids": ids, "attention_mask": mask}
    for name in taken_beside(model, rows.column_names):
        if name != "attention_mask" and any(row is not None for row in found[name]):
            is_of_rows = all(isinstance(row, int) for row in found[name])
            tensors[name] = torch.tensor(found[name]) if is_of_rows else cut.padded(name, found[name])
    if is_causal(model):
        has_labels = "labels" in rows.column_names and any(isinstance(row, list) for row in found["labels"])
        own = cut.padded("labels", found["labels"], IGNORED_LABEL) if has_labels else ids
        tensors["labels"] = _predicted(own).masked_fill(mask == 0, IGNORED_LABEL)
    elif labels is not None:
        tensors["labels"] = labels[numbers]
    return TensorRows(tensors, whole=len(numbers) == len(order))


class _Cut:
    """Where tokenized rows begin behind padding on the left, and how long they may be."""

    def __init__(self, numbers: Sequence[int], sequences: Sequence[Any], masks: Sequence[Any], length: int) -> None:
        self._numbers, self._sizes = numbers, [len(ids) for ids in sequences]
        begins = (next((place for place, counts in enumerate(mask) if counts), 0) for mask in masks)
        self._parts = [slice(begin, begin + length) for begin in begins]

    def padded(self, name: str, column: Sequence[Any], fill: int = 0) -> Tensor:
        """(rows, longest) int64 of a column with a value for each token."""
        if [len(row) if isinstance(row, list) else None for row in column] != self._sizes:
            raise ValueError(f"column {name!r} must have a value for each of input_ids, as the model takes it")
        rows = [torch.tensor(row[part]) for row, part in zip(column, self._parts, strict=True)]
        for number, row in zip(self._numbers, rows, strict=True):
            if row.is_floating_point() and not torch.equal(row, row.round()):
                wrong = row[row != row.round()][0]
                raise ValueError(f"column {name!r} must hold integers, and row {number} (counted from 0) holds {wrong}")
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill).to(torch.int64)


def taken_beside(model: PreTrainedModel, columns: Sequence[str]) -> list[str]:
    """Of these columns those that are arguments of the model beside its main input, and no labels."""
    arguments = inspect.signature(model.forward).parameters.keys() - set(find_labels(type(model)))
    return [name for name in columns if name in arguments and name != model.main_input_name]


def _tokens(row: dict[str, Any], has_mask: bool) -> int:
    return int(sum(row["attention_mask"])) if has_mask else len(row["input_ids"])


def _predicted(tokens: Tensor) -> Tensor:
    """The labels of (N, T) tokens: the tokens themselves but the first, which nothing in the sequence predicts."""
    labels = tokens.clone()
    labels[:, 0] = IGNORED_LABEL
    return labels
