"""The small LLaMA: its units are gated, and its sizes are what the options say."""

import torch
from lgelu_lab.benchmarks.data import BenchmarkData, ModelOptions
from lgelu_lab.benchmarks.llama import build_llama
from lgelu_lab.benchmarks.token_blocks import TokenBlocks
from lgelu_lab.benchmarks.wikitext import train_tokenizer
from torch.nn import functional as F

import hf_lgelu

TOKENIZER = train_tokenizer([" a few words to begin with \n"], 262, 8)
BLOCKS = TokenBlocks(torch.randint(0, 262, (5, 8), generator=torch.Generator().manual_seed(0)))
DATA = BenchmarkData(BLOCKS, BLOCKS, "validation", (), TOKENIZER)


def test_hardened_and_swapped_it_is_a_reglu():
    torch.manual_seed(0)
    model = build_llama("lambda_silu", DATA, ModelOptions(num_layers=2, width=16, num_heads=2)).eval()
    hf_lgelu.anneal_hardness(model, 1.0)
    hf_lgelu.substitute_relu(model)
    assert model.config.hidden_act == "relu"
    unit, x = model.model.layers[0].mlp, torch.randn(3, 16)
    by_hand = (F.relu(x @ unit.gate_proj.weight.T) * (x @ unit.up_proj.weight.T)) @ unit.down_proj.weight.T
    torch.testing.assert_close(unit(x), by_hand)
