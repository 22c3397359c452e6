"""The small LLaMA: its units are gated, and its sizes are what the options say."""

import pytest
import torch
from lgelu_lab.benchmarks.data import BenchmarkData, ModelOptions
from lgelu_lab.benchmarks.llama import LLAMA_WIKITEXT2, build_llama
from lgelu_lab.benchmarks.token_blocks import TokenBlocks
from lgelu_lab.benchmarks.wikitext import train_tokenizer
from torch.nn import functional as F

import hf_lgelu

TOKENIZER = train_tokenizer([" a few words to begin with \n"], 262, 8)
BLOCKS = TokenBlocks(torch.randint(0, 262, (5, 8), generator=torch.Generator().manual_seed(0)))
DATA = BenchmarkData(BLOCKS, BLOCKS, "validation", (), {}, TOKENIZER)


@pytest.mark.parametrize(("width", "hidden"), [(16, 48), (128, 344)])
def test_the_size_is_that_of_the_options(width, hidden):
    model = build_llama("silu", DATA, ModelOptions(num_layers=2, width=width, num_heads=2))
    attention, norms = 4 * width**2, 2 * width
    blocks = 2 * (attention + 3 * width * hidden + norms)
    assert model.num_parameters() == 262 * width + blocks + width
    assert model.config.max_position_embeddings == 8
    assert LLAMA_WIKITEXT2.model_options({}).width == 128


def test_hardened_and_swapped_it_is_a_reglu():
    torch.manual_seed(0)
    model = build_llama("lambda_silu", DATA, ModelOptions(num_layers=2, width=16, num_heads=2)).eval()
    hf_lgelu.anneal_hardness(model, 1.0)
    hf_lgelu.substitute_relu(model)
    assert model.config.hidden_act == "relu"
    unit, x = model.model.layers[0].mlp, torch.randn(3, 16)
    by_hand = (F.relu(x @ unit.gate_proj.weight.T) * (x @ unit.up_proj.weight.T)) @ unit.down_proj.weight.T
    torch.testing.assert_close(unit(x), by_hand)
