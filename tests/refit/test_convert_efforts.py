"""The rungs above the refit, the ladder that they are, and kept gates."""

import copy

import pytest
import torch
from loud_nets import llama, tokens
from small_networks import convert_with
from torch import nn

from hf_lgelu import convert_to_relu
from hf_lgelu.networks.batches import read_batches
from hf_lgelu.refit.config import ConversionConfig
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.samples import read_samples
from hf_lgelu.refit.widen import widen_original


def test_the_ridge_behind_a_placed_gate_is_that_of_its_new_features(monkeypatch):
    """The normal equations, dense, with the features of the network that came out."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 40), nn.GELU(), nn.Linear(40, 4)).double()
    model[0].weight.data *= 3
    inputs = torch.randn(400, 3, dtype=torch.float64)
    monkeypatch.setattr("hf_lgelu.refit.convert.is_nearer", lambda *gaps: True)  # the second rung is looked at here
    converted, report = convert_to_relu(model, inputs, effort="place")
    assert [step.effort for step in report.steps] == ["refit", "place"]
    assert report.steps[1].is_kept, report.steps
    folds = deal_folds(read_samples(read_batches(inputs)))
    rows = torch.cat([batch.load().inputs for fold in folds.folds for batch in fold])
    features, target = converted[1](converted[0](rows)).detach(), model(rows).detach()
    centred = features - features.mean(0)
    gram = centred.T @ centred
    gram += report.layers[0].strength * gram.diagonal().mean() * torch.eye(40, dtype=torch.float64)
    residual = target - features @ model[2].weight.T - model[2].bias
    change = torch.linalg.solve(gram, centred.T @ (residual - residual.mean(0))).T
    torch.testing.assert_close(converted[2].weight.detach(), (model[2].weight + change).detach(), rtol=0, atol=1e-8)
    # And the gates' maps are rows of the original times a slope.
    share = converted[0].weight / model[0].weight
    torch.testing.assert_close(share, share[:, :1].expand_as(share), rtol=1e-9, atol=0)
    assert (converted[0].weight - model[0].weight).abs().max() > 1e-3


def test_a_map_is_the_solution_of_the_normal_equations():
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 4)).double()
    inputs = torch.randn(400, 6, dtype=torch.float64)
    converted, report = convert_to_relu(model, inputs)
    assert "became ReLU\n" in str(report)
    folds = deal_folds(read_samples(read_batches(inputs)))
    rows = torch.cat([batch.load().inputs for fold in folds.folds for batch in fold])
    with torch.no_grad():
        features, wanted = model[0](rows).clamp(min=0), model(rows)
        centred = features - features.mean(0)
        gram = centred.T @ centred
        gram += report.layers[0].strength * gram.diagonal().mean() * torch.eye(9, dtype=torch.float64)
        residual = wanted - features @ model[2].weight.T - model[2].bias
        change = torch.linalg.solve(gram, centred.T @ (residual - residual.mean(0))).T
        torch.testing.assert_close(converted[2].weight.detach(), model[2].weight + change, rtol=0, atol=1e-8)


def test_wider_blocks_bring_a_gated_network_nearer(monkeypatch):
    inputs, widened = tokens(120), []
    make = lambda *given: widened.append(widen_original(*given)) or widened[-1]  # noqa: E731
    monkeypatch.setattr("hf_lgelu.refit.place.widen_original", make)
    model = llama(layers=1)
    before = copy.deepcopy(model.state_dict())
    report = convert_with(model, inputs, width=1.25, max_kl=None, effort="distill", distill_steps=8).report
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert report.width_share == 1.25
    assert len(widened) == 1  # for all rungs
    kept = [step.distance for step in report.steps if step.is_kept]
    assert kept == sorted(kept, reverse=True)
    assert len(kept) > 1
    assert kept[-1] < 0.9 * kept[0]
    assert report.held_out.refitted.kl == pytest.approx(kept[-1])
    assert any("the same inputs chose the rung" in warning for warning in report.warnings)


def test_options_of_distill_are_taken_with_the_effort_as_an_argument():
    torch.manual_seed(7)
    model, rows = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 4)), torch.randn(400, 6)
    options = ConversionConfig(distill_steps=4, max_kl=None)
    for report in (
        convert_to_relu(model, rows, effort="distill", options=options).report,
        convert_to_relu(model, rows, options=options).report,  # which implies it
    ):
        assert [step.effort for step in report.steps] == ["refit", "place", "distill"]
    with pytest.raises(ValueError, match=r"`distill_steps`.*'distill', got 'refit'"):
        convert_to_relu(model, rows, effort="refit", options=options)
