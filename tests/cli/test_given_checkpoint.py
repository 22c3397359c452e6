"""A checkpoint that a command was given is saved as what it was, or there is an error."""

import pytest
from full_disk import full_disk
from torch import nn
from transformers import BertConfig, BertModel

from hf_lgelu.cli.given_checkpoint import GivenCheckpoint, read_checkpoint
from hf_lgelu.cli.sentence_folder import SentenceFolder
from hf_lgelu.models.sentence_embedder import SentenceEmbedder

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def test_a_network_of_another_kind_is_not_left_out_without_a_word(place, tmp_path):
    given = read_checkpoint(str(place / "gelu"))
    with pytest.raises(TypeError, match=r"gelu was loaded as a MLPForClassification.*not saved as a Linear"):
        given.save(nn.Linear(2, 2), tmp_path / "out")
    encoder = BertModel(BertConfig(vocab_size=15, **SIZES))
    with pytest.raises(TypeError, match="not saved as a SentenceEmbedder"):
        GivenCheckpoint("bert", encoder).save(SentenceEmbedder(encoder, []), tmp_path / "out")
    whole = GivenCheckpoint("folder", SentenceEmbedder(encoder, []), SentenceFolder(tmp_path, ""))
    with pytest.raises(TypeError, match="not saved as a BertModel"):  # without its pooling
        whole.save(encoder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_encoder_that_does_not_fit_on_the_disk_is_told_as_such(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "modules.json").write_text("[]")
    encoder = BertModel(BertConfig(vocab_size=15, **SIZES))
    with full_disk(), pytest.raises(OSError, match="could not be written, and is not complete"):
        SentenceFolder(tmp_path / "folder", "").save(encoder, tmp_path / "out")
