"""Texts as token ids: blocks of a running text for a language model, a sequence each for other models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_lgelu.cli.inputs.input_set import TensorRows, sample_numbers
from hf_lgelu.models.checkpoint import processor_files
from hf_lgelu.models.padding import pad_tokens
from hf_lgelu.models.task_outputs import IGNORED_LABEL, is_causal

LONGEST = 1024
"""Tokens of a sequence where the user names no length and the model takes more."""

_TOGETHER = 64  # consecutive texts that stay together, so that most blocks are a text as it was written
_CHOICE = 4  # times as many blocks are cut as are wanted, so that those chosen are of many texts


def context_length(config: PreTrainedConfig, wanted: int | None) -> int:
    """Tokens of a sequence: `wanted`, or what the model takes, at most LONGEST.

    Raises ValueError if the model does not take as many as are wanted.
    """
    own = next(
        (size for name in ("n_positions", "max_position_embeddings") if (size := getattr(config, name, None))), None
    )
    if wanted is None:
        return min(own or LONGEST, LONGEST)
    if wanted < 2 or (own is not None and wanted > own):
        raise ValueError(f"--sequence_length must be from 2 to {own or 'what the model takes'}, got {wanted}")
    return wanted


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

    The texts follow one another without a token between, as in transformers' examples; what is left behind the last
    whole block is dropped. Of many texts only as many are read as it takes, in a seeded order.

    Raises ValueError if the texts do not fill one block.
    """
    starts = range(0, len(texts), _TOGETHER)
    order = starts if wanted is None else [starts[i] for i in sample_numbers(len(starts), None, seed)]
    tokens: list[int] = []
    for start in order:
        together = [text for text in texts[start : start + _TOGETHER] if text]
        if together:
            encoded = tokenizer(together, add_special_tokens=False, return_attention_mask=False, verbose=False)
            tokens += [token for text in encoded["input_ids"] for token in text]
        if wanted is not None and len(tokens) >= _CHOICE * wanted * length:
            break
    count = len(tokens) // length
    if not count:
        raise ValueError(
            f"the texts have {len(tokens)} tokens, which do not fill one sequence of {length}; give more of them, or "
            "a smaller --sequence_length"
        )
    blocks = torch.tensor(tokens[: count * length], dtype=torch.int64).view(count, length)
    blocks = blocks[torch.from_numpy(sample_numbers(count, wanted, seed))]
    return TensorRows({"input_ids": blocks, "labels": _predicted(blocks)})


def text_sequences(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    wanted: int | None,
    seed: int,
    labels: Tensor | None = None,
) -> TensorRows:
    """`wanted` texts that are not empty, or all, a row each, cut at `length` tokens and padded to the longest.

    `labels` (len(texts),) go along. Raises ValueError without a text, or without a token to pad with.
    """
    if tokenizer.pad_token is None:
        raise ValueError("the tokenizer has no token to pad with; set tokenizer.pad_token and save it beside the model")
    chosen = [number for number in sample_numbers(len(texts), None, seed).tolist() if (texts[number] or "").strip()][
        :wanted
    ]
    if not chosen:
        raise ValueError("the column holds no text: every row is empty")
    encoded = tokenizer(
        [texts[number] for number in chosen], truncation=True, max_length=length, padding=True, return_tensors="pt"
    )
    return TensorRows(dict(encoded) if labels is None else {**encoded, "labels": labels[chosen]})


def encoded_sequences(
    rows: Any, model: PreTrainedModel, length: int, wanted: int | None, seed: int, labels: Tensor | None = None
) -> TensorRows:
    """The columns input_ids and attention_mask of a tokenized data set, cut at `length` and padded on the right.

    Of rows that are padded on the left that goes first: cut, they would be padding for the most part.
    A language model's labels are its tokens, -100 where they are padding; another model's are `labels`, (len(rows),).
    """
    chosen = sample_numbers(len(rows), wanted, seed).tolist()
    found = rows[chosen]
    sequences = found["input_ids"]
    masks = found["attention_mask"] if "attention_mask" in rows.column_names else [[1] * len(ids) for ids in sequences]
    begins = [mask.index(1) if 1 in mask else 0 for mask in masks]

    def padded(column: list[list[int]]) -> Tensor:
        cut = [torch.tensor(row[begin : begin + length]) for row, begin in zip(column, begins, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(cut, batch_first=True).to(torch.int64)

    ids, mask = padded(sequences), padded(masks)
    if "input_ids" in (pad := pad_tokens(model)):
        # A classifier on a decoder looks for the model's own, whatever the rows were padded with.
        ids = ids.masked_fill(mask == 0, pad["input_ids"])
    tensors = {"input_ids": ids, "attention_mask": mask}
    if is_causal(model):
        tensors["labels"] = _predicted(tensors["input_ids"]).masked_fill(tensors["attention_mask"] == 0, IGNORED_LABEL)
    elif labels is not None:
        tensors["labels"] = labels[chosen]
    return TensorRows(tensors)


def _predicted(tokens: Tensor) -> Tensor:
    """The labels of (N, T) tokens: the tokens themselves but the first, which nothing in the sequence predicts."""
    labels = tokens.clone()
    labels[:, 0] = IGNORED_LABEL
    return labels
