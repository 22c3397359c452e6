"""The same conversion on an accelerator as on the CPU."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_lgelu import convert_to_relu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=16, vocab_size=50)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # or its gates hardly matter
    return model


def test_a_model_on_the_device_gets_the_weights_of_one_on_the_cpu(model):
    inputs = {"input_ids": torch.randint(50, (64, 16))}
    expected, report = convert_to_relu(model, inputs)
    given = copy.deepcopy(model).cuda()
    converted, on_device = convert_to_relu(given, inputs)
    assert {parameter.device.type for parameter in converted.parameters()} == {"cuda"}
    assert [layer.strength for layer in on_device.layers] == [layer.strength for layer in report.layers]
    for name, value in converted.state_dict().items():
        torch.testing.assert_close(value.cpu(), expected.state_dict()[name], rtol=1e-6, atol=1e-8, msg=name)
    assert on_device.held_out.refitted.kl == pytest.approx(report.held_out.refitted.kl, rel=1e-4)
    assert 0 < on_device.held_out.refitted.kl < on_device.held_out.direct.kl


def test_a_bfloat16_model_on_the_device_comes_nearer_to_the_original(model):
    converted, report = convert_to_relu(model.to("cuda", torch.bfloat16), {"input_ids": torch.randint(50, (64, 16))})
    assert {parameter.dtype for parameter in converted.parameters()} == {torch.bfloat16}
    assert 0 < report.held_out.refitted.kl < report.held_out.direct.kl
