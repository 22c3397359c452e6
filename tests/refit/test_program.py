"""A traced forward pass run in parts: every value is what a plain loop computes, and stays so while it is kept."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_lgelu.models.sites import find_sites
from hf_lgelu.refit import program as module
from hf_lgelu.refit.program import Program


class Residual(nn.Module):
    """A sum that is written over one of its parts, or is not."""

    def __init__(self, in_place):
        super().__init__()
        self.up, self.act, self.down, self.head = nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4), nn.Linear(4, 3)
        self.drop, self.in_place = nn.Dropout(0.5), in_place

    def forward(self, x):
        x = self.drop(x * 2.0)
        h = self.down(self.act(self.up(x)))
        if self.in_place:
            x += h
        else:
            x = x + h
        return self.head(x.reshape(len(x), -1))


@pytest.mark.parametrize("in_place", [False, True])
def test_every_value_is_kept(in_place, monkeypatch):
    written_anew = []
    can_be_kept = module._can_be_kept
    monkeypatch.setattr(
        module, "_can_be_kept", lambda given: written_anew.append(not can_be_kept(given)) or not written_anew[-1]
    )
    torch.manual_seed(0)
    model = Residual(in_place).double().eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    sites = find_sites(model)
    program = Program(model, sites, x)
    assert written_anew == [in_place]
    values = program.bind(x, torch.device("cpu")) | program.stored(model)
    program.run(program.operations, values, (), lambda site, value: sites[site].module(value))
    begin = x * 2
    hidden = F.linear(F.gelu(F.linear(begin, model.up.weight, model.up.bias)), model.down.weight, model.down.bias)
    total = begin + hidden
    scores = F.linear(total, model.head.weight, model.head.bias)
    found = [value for value in values.values() if isinstance(value, torch.Tensor)]
    for expected in (begin, hidden, total, scores):
        alike = [
            value for value in found if value.shape == expected.shape and torch.allclose(value, expected, atol=1e-12)
        ]
        assert alike, "a value was written over, or never computed"
