"""What the report of the kernels says."""

import torch

import hf_lgelu
from hf_lgelu.activation.kernels import KERNELS, kernel_report, use_kernel


def test_the_report_names_what_runs(calls):
    head, _, table = kernel_report().partition("\ntaken for\n")
    assert head.startswith("λ-GELU kernels, choice: automatic\n")
    taken = [line.split() for line in table.splitlines()]
    for device, dtype, name in taken:
        calls.clear()
        hf_lgelu.lambda_gelu(torch.zeros(1, device=device, dtype=getattr(torch, dtype)), torch.tensor([2.0]).to(device))
        assert calls == [name]
    cpu = [dtype for device, dtype, _ in taken if device == "cpu"]
    assert sorted(cpu) == ["bfloat16", "float16", "float32", "float64"]


def test_the_report_says_what_is_not_here_and_what_would_fail():
    with use_kernel("cpu"):
        text = kernel_report()
    assert "choice: cpu" in text
    assert "cpu float64   an error: the kernel 'cpu' was asked for" in text
    assert "it takes float32 and bfloat16, x is torch.float64" in text
    assert all(f"\n  {name} " in text for name in KERNELS)
