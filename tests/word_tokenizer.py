"""A tokenizer without a download."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(words, length):
    """A tokenizer of transformers whose tokens are these words; "<end>" is 0, ends texts and pads them."""
    vocabulary = {word: number for number, word in enumerate(["<end>", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, "<end>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>", model_max_length=length)
