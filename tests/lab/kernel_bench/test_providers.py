"""What is measured, and on what: providers against formulas of their own, modes against gradients by hand."""

import pytest
import torch
from lgelu_lab.kernel_bench import measure, providers
from torch import nn

EXPECTED = {
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "prelu": lambda x: torch.where(x > 0, x, 0.25 * x),
    "swish_beta": lambda x: x / (1 + torch.exp(-x)),
    "copy": lambda x: x,
    "lambda_silu": lambda x: x / (1 + torch.exp(-3.0 * x)),
    "lambda_gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (3 * x + 0.044715 * 27 * x**3))),
}


@pytest.mark.parametrize("name", [n for n, p in providers.PROVIDERS.items() if p.kernel != "inductor" and n != "xielu"])
def test_a_provider_computes_what_its_name_says(name):
    provider = providers.PROVIDERS[name]
    x = measure.new_input("5x7", "float32", "cpu", 0).requires_grad_()
    try:
        module = provider.build(x, 3.0)
    except RuntimeError as error:
        if "was asked for and cannot be used here" not in str(error):
            raise
        pytest.skip(str(error))
    expected = EXPECTED.get(name, lambda v: v * torch.special.ndtr(3.0 * v))(x.detach().double())
    assert torch.allclose(module(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_modes_give_the_gradients_of_x_and_of_the_parameters():
    x = torch.tensor([-2.0, 3.0], requires_grad=True)
    delta = torch.tensor([5.0, 7.0])
    module = nn.PReLU()  # slope 0.25; its gradient is the sum of δ·x where x < 0
    for mode in ("backward", "both"):
        call = measure.mode_call(module, mode, x, delta)
        for _ in range(2):  # the graph is kept
            dx, slope = call()
            assert dx.tolist() == [1.25, 7.0]
            assert slope.item() == -10.0
    assert measure.mode_call(module, "forward", x, delta)().tolist() == [-0.5, 3.0]
    copied = measure.mode_call(providers.Copy(), "both", x, delta)()
    assert [tensor.tolist() for tensor in copied] == [[-2.0, 3.0], [3.0, 10.0]]
