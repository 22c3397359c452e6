"""Rows of a language model: a text as blocks of tokens, held in memory."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hf_lgelu.networks.outputs import IGNORED_LABEL
from lgelu_lab.benchmarks.data import Batch


class TokenBlocks(Dataset):
    """N rows of T tokens, for a causal language model of transformers.

    A row is {"input_ids": (T,), "labels": (T,)}, int64. The labels are the tokens themselves, and the model
    shifts them; the first is -100, since nothing in the block predicts it. A count of the labels is then the
    number of predictions, T − 1 a row, for every version of Trainer.

    A DataLoader takes one batch with one `index_select` when it is given `collate_rows`: pass it as
    Trainer's `data_collator`, with `remove_unused_columns=False`.

    Args:
        tokens: (N, T), int64, T at least 2.
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    @classmethod
    def cut(cls, tokens: Tensor, context_length: int) -> "TokenBlocks":
        """Cut (M,) tokens into ⌊M/T⌋ contiguous blocks of T = `context_length`; the rest at the end is dropped.

        Raises ValueError if that leaves no block.
        """
        blocks = len(tokens) // context_length
        if blocks == 0:
            raise ValueError(
                f"a text of {len(tokens)} tokens has no block of context_length {context_length}; give a shorter one"
            )
        return cls(tokens[: blocks * context_length].view(blocks, context_length))

    def take(self, rows: Sequence[int] | Tensor) -> "TokenBlocks":
        """The blocks `rows`, in that order."""
        return TokenBlocks(self.tokens[torch.as_tensor(rows, dtype=torch.int64)])

    def to(self, device: torch.device) -> "TokenBlocks":
        """The same rows on another device."""
        return TokenBlocks(self.tokens.to(device))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Batch:
        return _with_labels(self.tokens[index])

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The rows `indices`, in that order, as one batch; `torch.utils.data` calls it for each batch."""
        rows = torch.as_tensor(indices, dtype=torch.int64, device=self.tokens.device)
        return _with_labels(self.tokens.index_select(0, rows))


def _with_labels(tokens: Tensor) -> Batch:
    labels = tokens.clone()
    labels[..., 0] = IGNORED_LABEL
    return {"input_ids": tokens, "labels": labels}
