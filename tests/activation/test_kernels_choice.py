"""Which kernel is taken: argument, context manager, environment, and what the report says of it."""

import pytest
import torch
from expectations import random

import hf_lgelu
from hf_lgelu.activation.kernels import KERNELS, Kernel, choose_kernel, use_kernel
from hf_lgelu.activation.report import kernel_report

X, HARDNESS = random(8, seed=1), torch.tensor([2.0])


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that ran, in order."""
    ran = []
    for name, kernel in list(KERNELS.items()):

        def function(x, hardness, gate, name=name, kernel=kernel):
            ran.append(name)
            return kernel.function(x, hardness, gate)

        monkeypatch.setitem(KERNELS, name, Kernel(name, kernel.description, function, kernel.refusal))
    return ran


def test_the_first_that_takes_the_input_runs(calls):
    hf_lgelu.lambda_gelu(X, HARDNESS)
    hf_lgelu.lambda_gelu(X.double(), HARDNESS)
    assert calls == ["cpu", "aten"]


def test_the_argument_wins_over_the_context_and_the_context_over_the_automatic_choice(calls):
    with use_kernel("aten"):
        hf_lgelu.lambda_gelu(X, HARDNESS)
        hf_lgelu.lambda_gelu(X, HARDNESS, kernel="eager")
    assert calls == ["aten", "eager"]


def test_contexts_nest_and_end_with_an_error(calls):
    with use_kernel("eager"):
        with use_kernel(None):
            hf_lgelu.lambda_gelu(X, HARDNESS)
        with pytest.raises(ZeroDivisionError), use_kernel("aten"):
            raise ZeroDivisionError
        hf_lgelu.lambda_gelu(X, HARDNESS)
    hf_lgelu.lambda_gelu(X, HARDNESS)
    assert calls == ["cpu", "eager", "cpu"]


def test_a_named_kernel_that_cannot_take_the_input_raises_and_says_why():
    with pytest.raises(RuntimeError, match=r"'cpu' was asked for .* float32 and bfloat16, x is torch.float64"):
        hf_lgelu.lambda_gelu(X.double(), HARDNESS, kernel="cpu")
    with use_kernel("cpu"), pytest.raises(RuntimeError, match="cannot be used here"):
        hf_lgelu.LambdaGELU()(X.double())


@pytest.mark.parametrize("name", ["fast", "CPU", ""])
def test_an_unknown_name_raises_and_lists_the_kernels(name):
    for ask in (lambda: use_kernel(name).__enter__(), lambda: choose_kernel(X, HARDNESS, name)):
        with pytest.raises(ValueError, match=f"one of {', '.join(KERNELS)}, .* got {name!r}"):
            ask()


def test_the_report_names_what_runs(calls):
    head, _, table = kernel_report().partition("\ntaken for\n")
    assert head.startswith("λ-GELU kernels, choice: automatic\n")
    taken = [line.split() for line in table.splitlines()]
    for device, dtype, name in taken:
        calls.clear()
        hf_lgelu.lambda_gelu(torch.zeros(1, device=device, dtype=getattr(torch, dtype)), HARDNESS.to(device))
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
