"""The tokenizer of a language model: a checkpoint's own, or one trained on the corpus."""

from collections.abc import Iterable

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lgelu_lab.benchmarks.locate import require_package

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""The 256 bytes and the end of a text."""


def train_tokenizer(lines: Iterable[str], vocabulary_size: int, context_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, GPT-2's kind; the same lines give the same tokenizer.

    It encodes any text without an unknown token, and the beginning and the end of a text are both
    <|endoftext|>. Where the lines hold too few different pairs, it has fewer tokens than asked for.

    Raises ValueError for a vocabulary smaller than SMALLEST_VOCABULARY.
    """
    if vocabulary_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocabulary_size must be at least {SMALLEST_VOCABULARY} (the 256 bytes and {END_OF_TEXT}), "
            f"got {vocabulary_size}"
        )
    tokenizers = require_package("tokenizers")
    bytes_of = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = bytes_of(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(bytes_of.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(pretrained: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, a folder or a Hub id.

    Raises RuntimeError if it cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(pretrained)
    except (OSError, ValueError) as error:  # which of the two depends on what is missing
        raise unreachable("tokenizer", pretrained, error) from error


def unreachable(what: str, pretrained: str, error: Exception) -> RuntimeError:
    """The error for a checkpoint whose `what` cannot be loaded."""
    return RuntimeError(
        f"the {what} of {pretrained!r} could not be loaded ({error}). Without network, give `pretrained` a folder that "
        "holds the checkpoint with its tokenizer, or leave it out to train from scratch"
    )
