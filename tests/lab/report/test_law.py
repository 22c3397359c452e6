"""What a large LLaMA needs: sizes against transformers' own networks, operations against torch's count."""

import math

import pytest
import torch
from lgelu_lab.report.law import Law
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"blocks": 2, "hidden": 512, "units": 1408, "key_values": 128, "vocabulary": 640}


@pytest.fixture(scope="module")
def network():
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=640, attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def test_both_networks_hold_two_bytes_a_weight(network):
    weights = sum(parameter.numel() for parameter in network.parameters() if parameter.ndim > 1)
    assert Law("", **SIZES).memory["both networks"] == pytest.approx(2 * 2 * weights / 1e9)


def test_a_forward_pass_has_the_operations_that_torch_counts(network):
    """Without attention's products of tokens with tokens, which torch counts as bmm."""
    with FlopCounterMode(display=False) as counter:
        network(input_ids=torch.zeros(1, 8, dtype=torch.long, device="meta"))
    counted = sum(value for name, value in counter.get_flop_counts()["Global"].items() if "bmm" not in str(name))
    tokens = 4 * 1408 * 8 / 7
    assert Law("", **SIZES).operations["forward passes"] == pytest.approx(3 * tokens * counted / 8)


def test_what_does_not_fit_has_no_hours():
    law = Law("7 B", 32, 4096, 11_008, 4096, 32_000)
    assert law.hours("GPU, 24 GB") == "–"
    assert 0 < float(law.hours("GPU, 80 GB")) < float(law.hours("32 cores")) < math.inf
