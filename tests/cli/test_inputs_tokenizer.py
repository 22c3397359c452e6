"""Samples of rows, and which tokenizers have words."""

import json

import pytest
from transformers import AutoConfig, AutoTokenizer

from hf_lgelu.cli.checkpoint import Checkpoint
from hf_lgelu.cli.rows import sample_numbers, tokenizer_of


@pytest.mark.parametrize("family", ["bert", "t5", "whisper"])
def test_a_tokenizer_without_words_is_none(family, tmp_path):
    """transformers makes one of special tokens alone: every text would be unknown, or empty."""
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no file of one.*Save"):
        tokenizer_of(Checkpoint(str(tmp_path), None))


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_a_tokenizer_whose_words_are_missing_is_none(family, tmp_path):
    config = AutoConfig.for_model(family)
    config.save_pretrained(tmp_path)
    name = AutoTokenizer.from_pretrained(tmp_path).__class__.__name__
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    with pytest.raises(ValueError, match="vocabulary"):
        tokenizer_of(Checkpoint(str(tmp_path), None))


def test_a_smaller_sample_is_part_of_a_larger_one():
    larger = sample_numbers(50, 20, 4)
    assert sample_numbers(50, 10, 4).tolist() == larger[:10].tolist()
    assert len(set(larger.tolist())) == 20
    assert sorted(sample_numbers(50, None, 4)) == list(range(50))
