"""Bytes of operations whose bytes are known."""

import pytest
import torch
from lgelu_lab.kernel_bench import timing
from torch import nn


@pytest.mark.parametrize(
    ("module", "bytes_per_element"),
    [
        (nn.ReLU(), 4),  # its output
        (nn.GELU(), 4),  # x
        (nn.Sequential(nn.GELU(), nn.ReLU()), 8),  # x and the output
        (nn.Sequential(nn.ReLU(), nn.GELU()), 4),  # ReLU's output is GELU's x: one storage
    ],
    ids=["relu", "gelu", "gelu-relu", "relu-gelu"],
)
def test_saved_bytes_of_known_operations(module, bytes_per_element):
    x = torch.randn(1000, requires_grad=True)
    assert timing.saved_bytes(lambda: module(x)) == 1000 * bytes_per_element


def test_peak_counts_what_is_held_at_one_time():
    def call():
        first = torch.ones(1000)  # 4000 bytes
        second = torch.ones(500)  # and 2000
        del first
        third = torch.ones(250)  # 2000 + 1000 are held now, less than before
        return second.numel() + third.numel()

    assert timing.peak_bytes(call, "cpu") == 6000


def test_resident_bytes_count_a_shared_storage_once():
    base = torch.zeros(100)
    assert timing.resident_bytes([base, base.view(10, 10), base[5:], torch.zeros(3)]) == 412
