"""WikiText-2 in the Hub's layout, a few lines of it."""

import datasets
import pytest
from lgelu_lab.benchmarks.data import DataOptions, ModelOptions
from lgelu_lab.benchmarks.wikitext import load_wikitext2, train_tokenizer

LINES = [
    "",
    " = A title = \n",
    "",
    " The first line says a thing , and the second says another . \n",
    " zebra yak xylophone \n",
]
OTHERS = [" = Another title = \n", " Nothing is said here that was said there . \n"]
SIZES = ModelOptions(context_length=8, vocabulary_size=280)


def texts(lines, **columns):
    return datasets.Dataset.from_dict({"text": lines, **columns})


@pytest.fixture
def copy(write_splits):
    return write_splits("wikitext2_small", {"train": texts(LINES * 6), "validation": texts(OTHERS * 3)})


def decoded(rows, tokenizer):
    return tokenizer.decode(rows.tokens.flatten().tolist())


def test_a_split_is_its_lines_cut_into_blocks(copy):
    data = load_wikitext2(DataOptions(copy), SIZES)
    for rows, lines in ((data.train, LINES * 6), (data.eval, OTHERS * 3)):
        text = "".join(lines)
        assert text.startswith(decoded(rows, data.processor))
        assert rows.tokens.shape[1] == 8
        assert rows.tokens.numel() == len(data.processor(text)["input_ids"]) // 8 * 8 > 0
    assert data.eval_split == "validation"
    assert data.label_names == ()


def test_the_tokenizer_knows_the_training_text_alone(copy):
    data = load_wikitext2(DataOptions(copy, max_train_samples=1), SIZES)
    assert data.processor.get_vocab() == train_tokenizer(LINES * 6, 280, 8).get_vocab()
    assert data.processor.get_vocab() != train_tokenizer((LINES + OTHERS) * 6, 280, 8).get_vocab()


def test_limits_count_blocks_of_a_seeded_choice(copy):
    whole = {tuple(row) for row in load_wikitext2(DataOptions(copy), SIZES).train.tokens.tolist()}
    few = load_wikitext2(DataOptions(copy, max_train_samples=5, max_eval_samples=2), SIZES)
    again = load_wikitext2(DataOptions(copy, max_train_samples=5, max_eval_samples=2), SIZES)
    other = load_wikitext2(DataOptions(copy, max_train_samples=5, split_seed=1), SIZES)
    assert (len(few.train), len(few.eval)) == (5, 2)
    assert {tuple(row) for row in few.train.tokens.tolist()} < whole
    assert few.train.tokens.equal(again.train.tokens)
    assert not few.train.tokens.equal(other.train.tokens)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": texts(LINES)}, "has no split or column 'validation'; it has {'train'"),
        ({"train": texts(LINES), "validation": texts(["ab"])}, "a text of 2 tokens has no block of context_length 8"),
    ],
)
def test_data_that_do_not_do_are_told(write_splits, splits, message):
    data_dir = write_splits("wikitext2", splits)
    with pytest.raises(ValueError, match=message):
        load_wikitext2(DataOptions(data_dir), SIZES)


CORPUS = ["", " = Valkyria = \n", " the cat and the other cat sat on the mat with the third cat \n"] * 3


def test_it_encodes_and_decodes_any_text():
    tokenizer = train_tokenizer(CORPUS, 280, 16)
    assert len(tokenizer) == 280
    text = " = Zoë 日本 <unk> @-@ \n the cat"
    numbers = tokenizer(text)["input_ids"]
    assert tokenizer.decode(numbers) == text
    assert len(numbers) < len(text.encode())  # pairs of bytes were merged
    assert tokenizer("the cat\n\n = ", add_special_tokens=True) == tokenizer("the cat\n\n = ", add_special_tokens=False)


def test_the_end_of_a_text_is_one_token():
    tokenizer = train_tokenizer(CORPUS, 280, 16)
    assert tokenizer("<|endoftext|>")["input_ids"] == [tokenizer.eos_token_id] == [tokenizer.bos_token_id] == [0]
    assert tokenizer.model_max_length == 16
