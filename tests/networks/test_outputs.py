"""Outputs: which models predict the next token, and which outputs are probabilities."""

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForTokenClassification,
    BertGenerationConfig,
    BertGenerationDecoder,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2LMHeadModel,
    ReformerConfig,
    ReformerModelWithLMHead,
)

from hf_lgelu.networks.outputs import are_probabilities, is_causal


def test_models_that_predict_the_next_token_are_known_also_by_what_they_are_made_of():
    class Own(GPT2LMHeadModel):
        pass

    gpt = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8)
    bart = BartConfig(vocab_size=11, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                      decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8)  # fmt: skip
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    with torch.device("meta"):
        generation = BertGenerationDecoder(BertGenerationConfig(vocab_size=11, is_decoder=True, **sizes))
        reformer = ReformerModelWithLMHead(ReformerConfig(is_decoder=True))
        causal = Own(gpt), GPT2DoubleHeadsModel(gpt), generation, reformer
        classifier = BertForTokenClassification(BertConfig(vocab_size=11, **sizes))
        others = BartForConditionalGeneration(bart), classifier, nn.Linear(2, 2)
    assert [is_causal(model) for model in causal] == [True] * 4
    assert [is_causal(model) for model in others] == [False] * 3


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (torch.tensor([[0.2, 0.8], [1.0, 0.0]]), True),
        (torch.tensor([[0.2, 0.7], [1.0, 0.0]]), None),  # four numbers may lie there by chance
        (torch.full((8, 4), 0.7), False),  # 32 are of a sigmoid
        (torch.full((8, 4), 0.7).index_fill(0, torch.tensor([3]), -0.1), None),
        (torch.tensor([[1.2, -0.2], [0.5, 0.5]]), None),
        (torch.zeros(0, 4), None),
        (torch.tensor([[0.2, 0.8], [0.3, 0.7]]).bfloat16(), True),
    ],
)
def test_what_counts_as_probabilities(output, expected):
    assert are_probabilities(output) is expected
