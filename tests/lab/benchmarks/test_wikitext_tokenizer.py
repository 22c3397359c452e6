"""Tokenizers trained on a corpus, and those of checkpoints."""

from lgelu_lab.benchmarks.wikitext import train_tokenizer

LINES = ["", " = Valkyria = \n", " the cat and the other cat sat on the mat with the third cat \n"] * 3


def test_it_encodes_and_decodes_any_text():
    tokenizer = train_tokenizer(LINES, 280, 16)
    assert len(tokenizer) == 280
    text = " = Zoë 日本 <unk> @-@ \n the cat"
    numbers = tokenizer(text)["input_ids"]
    assert tokenizer.decode(numbers) == text
    assert len(numbers) < len(text.encode())  # pairs of bytes were merged
    assert tokenizer("the cat\n\n = ", add_special_tokens=True) == tokenizer("the cat\n\n = ", add_special_tokens=False)


def test_the_end_of_a_text_is_one_token():
    tokenizer = train_tokenizer(LINES, 280, 16)
    assert tokenizer("<|endoftext|>")["input_ids"] == [tokenizer.eos_token_id] == [tokenizer.bos_token_id] == [0]
    assert tokenizer.model_max_length == 16
