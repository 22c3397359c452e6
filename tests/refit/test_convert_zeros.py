"""A share of zeros behind every gate: the kinks are quantiles, the refit is the dense one, and what leaves is plain."""

import math

import numpy as np
import pytest
import torch
from loud_nets import bert, llama, tokens
from torch import nn
from transformers import BertForSequenceClassification

from hf_lgelu import ConversionRefusedError, convert_to_relu
from hf_lgelu.refit.batches import read_batches
from hf_lgelu.refit.folds import deal_folds


@torch.no_grad()
def test_kinks_are_quantiles_and_the_map_behind_is_fitted_to_what_is_left():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4)).double().eval()
    inputs = torch.randn(600, 6, dtype=torch.float64)
    converted, report = convert_to_relu(model, inputs, zeros=0.9, max_kl=None)
    rows = torch.cat([batch.load().inputs for fold in deal_folds(read_batches(inputs)).folds for batch in fold])
    z = model[0](rows)
    order = np.sort(z.float().numpy(), axis=0)  # fewer rows than are looked at: all of them
    kinks = np.maximum(order[math.ceil(0.9 * len(z)) - 1], 0)
    np.testing.assert_allclose((model[0].bias - converted[0].bias).numpy(), kinks, atol=1e-6)
    assert torch.equal(converted[0].weight, model[0].weight)
    features = (z - torch.tensor(kinks)).clamp(min=0)
    centred = features - features.mean(0)
    gram = centred.T @ centred
    gram += report.layers[0].strength * gram.diagonal().mean() * torch.eye(9, dtype=torch.float64)
    residual = model(rows) - features @ model[2].weight.T - model[2].bias
    change = torch.linalg.solve(gram, centred.T @ (residual - residual.mean(0))).T
    torch.testing.assert_close(converted[2].weight, model[2].weight + change, rtol=0, atol=1e-5)
    shares = []
    for network in (nn.Sequential(model[0], nn.ReLU()), converted[:2]):
        held = torch.cat([batch.load().inputs for batch in deal_folds(read_batches(inputs)).held_out])
        shares.append((network(held) == 0).double().mean().item())
    assert report.zeros == pytest.approx(shares)
    assert abs(report.zeros[1] - 0.9) < 0.05
    assert "are zeros (90.00 % wanted), " in str(report)
    assert report.held_out.refitted.kl > report.held_out.direct.kl
    assert "with zeros=0.9 the network is further from the original (KL 0.00447 nat) than the direct swap" in str(
        report
    )


def test_a_network_with_more_zeros_is_a_plain_checkpoint(tmp_path):
    inputs = {**tokens(80), "attention_mask": torch.ones(80, 12, dtype=torch.long)}
    inputs["attention_mask"][:40, 7:] = 0
    converted, report = convert_to_relu(bert(), inputs, zeros=0.8, tolerance=10.0, max_kl=None)
    assert [step.effort for step in report.steps] == ["refit"]
    before, after = report.zeros
    assert before < 0.7
    assert after == pytest.approx(0.8, abs=0.04)
    converted.save_pretrained(tmp_path)
    again = BertForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(**tokens(3)).logits, converted(**tokens(3)).logits)


class Named(nn.Module):
    """The first output is one number for all, and not what counts."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 4)

    def forward(self, x):
        found = self.down(self.act(self.up(x)))
        return found.sum(), found


def test_zeros_are_counted_whatever_outputs_count():
    report = convert_to_relu(Named().eval(), torch.randn(200, 6), outputs=("1",)).report
    assert 0 < report.zeros[0] < 1


def test_zeros_that_cannot_be_had_are_refused():
    model, rows = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 4)), torch.randn(200, 6)
    for wrong in ({"zeros": 1.0}, {"zeros": 0}, {"zeros": True}, {"zeros": 0.9, "target": "leaky_relu"}):
        with pytest.raises(ValueError, match="zeros must be a share between 0 and 1"):
            convert_to_relu(model, rows, **wrong)
    for wrong in ({"effort": "blocks"}, {"width_budget": 1.5}):
        with pytest.raises(ValueError, match="goes with effort='refit' and no width_budget"):
            convert_to_relu(model, rows, zeros=0.9, **wrong)
    with pytest.raises(ConversionRefusedError, match=r"bias before the gate .* model.layers.0.mlp.act_fn"):
        convert_to_relu(llama(), tokens(), zeros=0.9)
