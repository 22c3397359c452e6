"""Outputs that are not finite are infinitely far: what is finite is nearer, and neither JSON nor a page says NaN."""

import dataclasses
import json
import math

import pytest
import torch
from report_by_hand import REPORT
from torch import nn

from hf_lgelu import ConversionRefusedError, convert_to_relu
from hf_lgelu.export.card import Provenance, render_conversion_card
from hf_lgelu.models.checkpoint import CheckpointFacts


@pytest.fixture
def near_the_end_of_float16():
    """Its largest number inside is 56,000; with ReLU at the second gate, 76,000, and float16 ends at 65,504."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4)
    )
    rows = torch.randn(600, 6)
    with torch.no_grad():
        net[2].weight.copy_(12 * torch.rand(32, 64))
        net[2].bias.zero_()
        net[4].weight.copy_(torch.rand(32, 32))
        net[4].bias.zero_()
        net[4].weight.mul_(56000 / net[:5](rows).abs().max())
        net[6].weight.mul_(3)
    return net.half().eval(), rows.half()


def kl(reference, other):
    p, q = (value.double().log_softmax(-1) for value in (reference, other))
    return (p.exp() * (p - q)).sum(-1).mean().item()


@torch.no_grad()
def test_a_conversion_is_kept_where_the_plain_swap_overflows(near_the_end_of_float16):
    net, rows = near_the_end_of_float16
    swapped = nn.Sequential(*(nn.ReLU() if isinstance(module, nn.GELU) else module for module in net))
    assert not math.isfinite(kl(net(rows), swapped(rows)))
    converted, report = convert_to_relu(net, rows[:500], evaluation_data=rows[500:])
    assert report.evaluation.refitted.kl == pytest.approx(kl(net(rows[500:]), converted(rows[500:])), rel=1e-6)
    assert report.evaluation.refitted.kl < 0.01
    assert report.held_out.direct.value == math.inf
    assert not report.warnings
    assert "(infinitely far)" not in str(report)


class Root(nn.Module):
    """Finite layers, and after them values of which some are NaN."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x):
        return {"values": self.inner(x).sub(9).sqrt()}


def test_values_that_are_all_nan_are_not_taken_for_the_same():
    with pytest.raises(ConversionRefusedError, match="not finite") as caught:
        convert_to_relu(Root().eval(), torch.randn(200, 4))
    assert caught.value.report.held_out.refitted.value == math.inf


def test_json_has_null_for_what_is_not_finite_and_no_page_says_nan():
    broken = dataclasses.replace(
        REPORT.held_out.direct, kl=math.nan, largest_change=math.inf, relative_error=math.nan
    )  # fmt: skip
    report = dataclasses.replace(REPORT, held_out=dataclasses.replace(REPORT.held_out, direct=broken))
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["held_out"]["direct"]["kl"] is None
    assert report.held_out.direct.value == math.inf
    assert report.held_out.direct.in_words == "infinitely far"
    card = render_conversion_card(report, Provenance("a", "b", 3), CheckpointFacts("GPT2LMHeadModel"))
    for shown in (str(report), str(card)):
        assert "not finite" in shown
        assert "nan" not in shown.replace("nanos", "").split()
