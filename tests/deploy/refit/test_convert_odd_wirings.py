"""Networks with unusual wiring: what is refitted is held against dense least squares, or against what the nets give."""

import pytest
import torch
from dense_oracle import Step, ones, refit
from refit_nets import drawn
from torch import Tensor, nn

from hf_lgelu import convert_to_relu
from hf_lgelu.deploy.refit.calibration import read_batches
from hf_lgelu.deploy.refit.plan import plan_calibration


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class NormedTokens(nn.Module):
    """BatchNorm over tokens: its bias is none of the map's, though its scale is one number for all channels."""

    def __init__(self, tokens):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 6)
        self.norm, self.relu, self.head = nn.BatchNorm1d(tokens), nn.ReLU(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, tokens, 4)."""
        return self.head(self.relu(self.norm(self.down(self.act(self.up(x))))))


@pytest.mark.parametrize("tokens", [5, 6])
def test_a_batch_norm_over_another_axis_is_left_alone(tokens):
    torch.manual_seed(0)
    model = drawn(NormedTokens(tokens))
    with torch.no_grad():
        model.norm.weight.fill_(1.3)
        model.norm.running_var.fill_(0.7)
    inputs = rows(96, tokens, 4)
    converted, _ = convert_to_relu(model, inputs)
    step = Step(("down",), "down", bias=("down.bias", ones))
    expected, _ = refit(model, [step], plan_calibration(read_batches(inputs)))
    torch.testing.assert_close(converted.down.weight, expected.down.weight, rtol=0, atol=1e-9)
    torch.testing.assert_close(converted.down.bias, expected.down.bias, rtol=0, atol=1e-9)
    for name, value in model.norm.state_dict().items():
        assert torch.equal(converted.norm.state_dict()[name], value), name
