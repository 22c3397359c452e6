"""What a step with the aten kernel allocates at its peak, against nn.GELU."""

import pytest
import torch
from expectations import random
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from hf_lgelu.activation.kernels import aten, chunked


def peak_of_a_step(function, x, delta):
    """Largest sum of allocated bytes during forward and backward, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function(x).backward(delta)
    level = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    assert peak >= 2 * x.nbytes  # the value and the gradient: the profiler saw them
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_step_needs_no_more_memory_than_with_gelu_but_for_a_few_pieces(monkeypatch, dtype, layout):
    monkeypatch.setattr(chunked, "CHUNK", 4096)
    x = random(4, 64, 32, 32, seed=25, dtype=dtype).contiguous(memory_format=layout)
    delta = random(4, 64, 32, 32, seed=26, dtype=dtype).contiguous(memory_format=layout)
    hardness = torch.tensor([2.0], requires_grad=True)
    of_gelu = peak_of_a_step(F.gelu, x.clone().requires_grad_(), delta)
    got = peak_of_a_step(lambda x: aten.lambda_gate(x, hardness), x.requires_grad_(), delta)
    pieces = 5 if dtype == torch.float32 else 7
    assert got <= of_gelu + pieces * 4 * 4096 * torch.get_num_threads() + 1024


def test_whole_tensors_take_four_besides_the_incoming_gradient(monkeypatch):
    monkeypatch.setattr(aten, "opaque_refusal", lambda x, other: "not here")  # as on an accelerator
    x, delta = random(100_000, seed=27).requires_grad_(), random(100_000, seed=28)
    hardness = torch.tensor([2.0], requires_grad=True)
    assert peak_of_a_step(lambda x: aten.lambda_gate(x, hardness), x, delta) <= 5 * x.nbytes + 1024
