"""WikiText-2 in the Hub's layout, a few lines of it."""

import math

import datasets
import pytest
import torch
from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions, ModelOptions
from lgelu_lab.benchmarks.token_blocks import TokenBlocks
from lgelu_lab.benchmarks.wikitext import build_gpt2, load_wikitext2, train_tokenizer
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel

from hf_lgelu import hardness_profile

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


def test_a_text_shorter_than_a_block_is_refused(write_splits):
    data_dir = write_splits("wikitext2", {"train": texts(LINES), "validation": texts(["ab"])})
    with pytest.raises(ValueError, match=r"2 tokens .*context_length 8"):
        load_wikitext2(DataOptions(data_dir), SIZES)


TOKENIZER = train_tokenizer([" a few words to begin with \n"], 262, 8)
BLOCKS = TokenBlocks(torch.randint(0, 262, (5, 8), generator=torch.Generator().manual_seed(0)))
DATA = BenchmarkData(BLOCKS, BLOCKS, "validation", (), TOKENIZER)
SMALL = ModelOptions(num_layers=3, width=16, num_heads=2)


@pytest.fixture
def checkpoint(tmp_path):
    """(folder, model): 12 positions, tanh GELU, and weights large enough that the two GELUs differ."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, n_positions=12, vocab_size=262, bos_token_id=0, eos_token_id=0,
        initializer_range=0.4,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "checkpoint")
    return str(tmp_path / "checkpoint"), model


@pytest.mark.parametrize(("activation", "hardnesses"), [("gelu", 0), ("lambda_gelu", 3)])
def test_from_scratch_it_has_the_size_asked_for(activation, hardnesses):
    model = build_gpt2(activation, DATA, SMALL)
    # attention 4·16·16 + 4·16, feed-forward 2·16·64 + 64 + 16, two norms; the head is the embedding
    block = (4 * 256 + 64) + (2 * 1024 + 80) + 64
    embeddings = 262 * 16 + 8 * 16
    assert model.num_parameters() == 3 * block + embeddings + 32 + hardnesses
    config = model.config
    assert (config.n_head, config.n_positions, config.vocab_size) == (2, 8, 262)
    assert (config.bos_token_id, config.eos_token_id) == (0, 0) == (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id)
    assert config.activation_function == activation
    assert model(**BLOCKS.__getitems__([0, 1])).loss.item() == pytest.approx(math.log(262), rel=0.05)


def test_a_checkpoint_keeps_its_weights(checkpoint):
    folder, original = checkpoint
    model = build_gpt2("lambda_gelu", DATA, ModelOptions(pretrained=folder))
    assert hardness_profile(model).keys() == {"transformer.h.0.mlp.act", "transformer.h.1.mlp.act"}
    assert all(1 < value < 1.2 for value in hardness_profile(model).values())
    assert model.config.activation_function == "lambda_gelu"
    expected = original.state_dict()
    for name, tensor in model.state_dict().items():
        if name in expected:
            assert torch.equal(tensor, expected[name]), name
    assert expected.keys() <= model.state_dict().keys()


def test_checkpoints_that_do_not_do_are_told(checkpoint, tmp_path):
    folder, _ = checkpoint
    long = TokenBlocks(torch.zeros(2, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"12 positions.*context_length 13"):
        build_gpt2("gelu", BenchmarkData(long, long, "", (), TOKENIZER), ModelOptions(pretrained=folder))
    BertConfig(hidden_size=8).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"GPT-2.* bert"):
        build_gpt2("gelu", DATA, ModelOptions(pretrained=str(tmp_path / "bert")))
