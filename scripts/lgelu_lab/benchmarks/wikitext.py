"""WikiText-2 (Merity et al., 2017) as blocks of tokens: the paper's GPT-2/WikiText-2."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lgelu_lab.benchmarks.token_blocks import TokenBlocks
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.benchmarks.locate import load_splits
from lgelu_lab.benchmarks.options import DataOptions, ModelOptions
from lgelu_lab.benchmarks.splits import choose_rows
from lgelu_lab.benchmarks.tokenizer import load_tokenizer, train_tokenizer

HUB_ID = "Salesforce/wikitext"
HUB_CONFIG = "wikitext-2-raw-v1"
FOLDER = "wikitext2"
FOLDERS = (FOLDER, "wikitext2_small")
COLUMN = "text"
CONTEXT_LENGTH = 128
VOCABULARY_SIZE = 4096


def load_wikitext2(options: DataOptions | None = None, model: ModelOptions | None = None) -> BenchmarkData:
    """The splits of WikiText-2, each joined to one text and cut into contiguous blocks.

    The tokenizer is that of `model.pretrained`, or a byte-level BPE of `model.vocabulary_size` tokens that is
    trained on the training text, all of it, whatever `options.max_train_samples` says. What is left of a split
    behind its last whole block is dropped.

    A run is selected on the validation split. With `options.validation_fraction` it is that share of the
    training text, from its end, which then neither the tokenizer nor the model is trained on. `test` is the
    test split, and where a copy has none, the validation split. The limits on samples count blocks.

    Raises ValueError for missing, empty or too short data or a vocabulary that is too small; ImportError
    without datasets; RuntimeError if the Hub, or the checkpoint, cannot be reached.
    """
    options, model = options or DataOptions(), model or ModelOptions()
    found = load_splits(
        FOLDERS,
        HUB_ID,
        options.data_dir,
        splits=("train", "validation"),
        columns=(COLUMN,),
        optional_splits=("test",),
        hub_config=HUB_CONFIG,
    )
    lines = {split: _lines(rows, split) for split, rows in found.items()}
    test_split = eval_split = "validation"
    if "test" in lines:
        test_split = "test"
    if options.validation_fraction > 0:
        eval_split = f"validation ({options.validation_fraction * 100:g} % of train, its end)"
        lines["train"], lines["held out"] = _hold_out(lines["train"], options.validation_fraction)
    context_length = model.context_length or CONTEXT_LENGTH
    if model.pretrained is None:
        tokenizer = train_tokenizer(lines["train"], model.vocabulary_size or VOCABULARY_SIZE, context_length)
    else:
        tokenizer = load_tokenizer(model.pretrained)
    blocks = {split: _blocks(text, tokenizer, context_length, split) for split, text in lines.items()}
    test = blocks["test"] if "test" in blocks else blocks["validation"]
    train, test = _limited(blocks["train"], test, options)
    _, evaluated = _limited(blocks["train"], blocks.get("held out", blocks["validation"]), options)
    return BenchmarkData(
        train=train,
        eval=evaluated,
        test=test,
        eval_split=eval_split,
        test_split=test_split,
        label_names=(),
        preprocessing=_describe(tokenizer, model.pretrained, context_length),
        processor=tokenizer,
    )


def _lines(rows: Any, split: str) -> list[str]:
    lines = rows[COLUMN][:]
    if not all(isinstance(line, str) for line in lines):
        raise ValueError(f"column {COLUMN!r} of split {split!r} of {FOLDER} must hold text in every row")
    if not any(line.strip() for line in lines):
        raise ValueError(f"split {split!r} of {FOLDER} holds no text")
    return lines


def _hold_out(lines: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Whole lines (kept, held out): the last `fraction` of the characters, as nearly as lines allow."""
    ends = np.cumsum([len(line) for line in lines])
    kept = int(np.argmin(np.abs(ends - (1 - fraction) * ends[-1]))) + 1
    if not any(line.strip() for line in lines[kept:]):
        raise ValueError(
            f"holding out a validation_fraction of {fraction:g} leaves no text to evaluate on: the training split has "
            f"{len(lines)} lines"
        )
    return lines[:kept], lines[kept:]


def _blocks(lines: list[str], tokenizer: PreTrainedTokenizerBase, context_length: int, split: str) -> TokenBlocks:
    try:
        return TokenBlocks.cut(_encode("".join(lines), tokenizer), context_length)
    except ValueError as error:
        raise ValueError(f"split {split!r} of {FOLDER}: {error}") from error


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    # Quiet: the text is longer than any context, and is cut afterwards.
    encoded = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return torch.tensor(encoded["input_ids"], dtype=torch.int64)


def _limited(train: TokenBlocks, evaluated: TokenBlocks, options: DataOptions) -> tuple[TokenBlocks, TokenBlocks]:
    # Blocks have no class to stratify by, and what is held out is already out.
    chosen = choose_rows(np.zeros(len(train)), len(evaluated), replace(options, validation_fraction=0.0))
    return train.take(chosen.train), evaluated.take(chosen.test)


def _describe(tokenizer: PreTrainedTokenizerBase, pretrained: str | None, context_length: int) -> dict[str, Any]:
    return {
        "tokenizer": pretrained or "byte-level BPE trained on the training text",
        "vocabulary_size": len(tokenizer),
        "context_length": context_length,
    }
