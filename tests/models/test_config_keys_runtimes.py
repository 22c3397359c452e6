"""What other programs do with a checkpoint's activation: who is warned."""

import torch
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    ViTConfig,
)

from hf_lgelu.models.config_keys import runtime_warnings


def warned(config):
    """The first two words of each sentence about the model without a head."""
    with torch.device("meta"):
        return [sentence.split()[:2] for sentence in runtime_warnings(AutoModel.from_config(config))]


def test_families_that_are_known_to_be_ignored_are_warned_of():
    inner = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    assert warned(GPT2Config(n_layer=1)) == warned(BertConfig(num_hidden_layers=1)) == [["llama.cpp", "ignores"]]
    said = "CTranslate2 ignores, llama.cpp ignores, MLX ignores, SGLang refuses, TGI has, vLLM refuses"
    assert warned(inner) == [each.split() for each in said.split(", ")]
    assert warned(LlavaConfig(text_config=inner)) == warned(inner)


def test_others_are_not():
    assert warned(ViTConfig(num_hidden_layers=1)) == []
    classifier = BertForSequenceClassification(BertConfig(num_hidden_layers=1, hidden_size=12, vocab_size=9))
    assert runtime_warnings(classifier) == runtime_warnings(nn.GELU()) == ()
