"""Kinks and slopes of gates that follow a BatchNorm, and a detector's wiring (split, joined, pooled, several maps)."""

import copy
from contextlib import closing

import pytest
import torch
from torch import nn

from hf_lgelu import convert_to_relu
from hf_lgelu.graph.layers import find_layers
from hf_lgelu.graph.recording import Recording, Recordings
from hf_lgelu.networks.batches import read_batches
from hf_lgelu.networks.sites import SMOOTH_KINDS, find_sites
from hf_lgelu.refit.carry import Carrier
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.kinks import Kinks
from hf_lgelu.refit.place import gather_placements, write_placement
from hf_lgelu.refit.samples import read_samples


def random_norms(model):
    """Statistics and scales as after training, so that no BatchNorm is the identity."""
    draws = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values, low, high in (
                (module.weight.data, 0.5, 2.0), (module.bias.data, -1.0, 1.0),
                (module.running_mean, -0.5, 0.5), (module.running_var, 0.2, 1.0),
            ):  # fmt: skip
                values.uniform_(low, high, generator=draws)
    return model.eval()


def small():
    torch.manual_seed(0)
    first, second = nn.Conv2d(2, 6, 3, bias=False), nn.Conv2d(6, 5, 3, bias=False)
    return random_norms(
        nn.Sequential(
            first, nn.BatchNorm2d(6), nn.SiLU(), second, nn.BatchNorm2d(5), nn.SiLU(), nn.Flatten(), nn.Linear(80, 3)
        )
    )


def pictures(count, channels=2, side=8):
    return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(1))


def test_a_gate_behind_a_norm_is_placed_in_the_norms_scale_and_shift():
    model = small()
    sites = find_sites(model, SMOOTH_KINDS)
    units = find_layers(Recording(model, sites, pictures(4)), model, sites).fed_gates
    assert [unit.before.parameters for unit in units] == [
        ("1.weight", "1.bias"),
        ("4.weight", "4.bias"),
    ]
    converted = copy.deepcopy(model)
    draws = torch.Generator().manual_seed(2)
    slope, kink = torch.rand(6, generator=draws).double() + 0.5, torch.randn(6, generator=draws).double()
    write_placement(converted, units[0], Kinks(slope[:, None], kink[:, None], slope, slope, slope))
    with torch.no_grad():
        z = model[:2].double()(pictures(4).double())
        found = converted[:2].double()(pictures(4).double()).relu()
    channels = (1, -1, 1, 1)
    torch.testing.assert_close(found, slope.view(channels) * (z - kink.view(channels)).relu(), atol=1e-6, rtol=1e-6)


def over_several_axes(channels, side, normalize):
    torch.manual_seed(0)
    first, last = nn.Conv2d(2, channels, 3, padding=1), nn.Linear(channels * side * side, 4)
    with torch.no_grad():
        for parameter in normalize.parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    return nn.Sequential(first, normalize, nn.GELU(), nn.Flatten(), last).eval()


@pytest.mark.parametrize(
    ("channels", "side"), [(8, 8), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((8, 6), (6, 8)))]
)
def test_a_norm_over_several_axes_is_left_as_it_is(channels, side):
    """Its scale and shift are numbers of a place, and no channel's."""
    model, inputs = over_several_axes(channels, side, nn.LayerNorm([channels, side, side])), pictures(150, side=side)
    converted, report = convert_to_relu(model, inputs, effort="place")
    for name, value in model[1].named_parameters():
        assert torch.equal(converted[1].get_parameter(name), value)
    assert report.steps[1].distance == pytest.approx(report.steps[0].distance, rel=1e-6)  # nothing to place


def test_the_sums_of_a_placement_are_those_of_the_norms_output():
    model = small()
    sites = find_sites(model, SMOOTH_KINDS)
    folds = deal_folds(read_samples(read_batches(pictures(70))), batch_size=16)
    with closing(Carrier(Recordings(model, sites), copy.deepcopy(model), folds)) as carrier:
        sums = gather_placements(carrier, carrier.pair.layers.fed_gates, folds)
    with torch.no_grad():
        seen = [model[:2](fold[0].load().inputs).movedim(1, -1).reshape(-1, 6).double() for fold in folds.folds]
    z = torch.cat([rows[:: max(1, len(rows) // 1024)] for rows in seen])  # of each of four folds a fourth of 4,096
    torch.testing.assert_close(sums[0].sums[1].sum(-1), z.sum(0))
    torch.testing.assert_close(sums[0].square, torch.nn.functional.silu(z).square().sum(0), rtol=1e-5, atol=0)


def test_what_is_behind_a_changed_norm_is_carried_with_the_change():
    model = small()
    sites = find_sites(model, SMOOTH_KINDS)
    folds = deal_folds(read_samples(read_batches(pictures(70))), batch_size=16)
    converted = copy.deepcopy(model)
    converted[2] = converted[5] = nn.ReLU()
    with torch.no_grad():
        converted[1].weight.mul_(torch.linspace(0.5, 2.0, 6))
        converted[1].bias.add_(1.0)
        seen = [converted[:3](batch.load().inputs) for fold in folds.folds for batch in fold]
    with closing(Carrier(Recordings(model, sites), converted, folds)) as carrier:
        (sums,) = carrier.advance_to(0)
    windows = nn.functional.unfold(torch.cat(seen).double(), 3)  # all of them: there are fewer than would be drawn
    assert sum(fold.count for fold in sums) == windows.shape[0] * windows.shape[2]
    torch.testing.assert_close(sum(fold.feature_sum for fold in sums)[0], windows.sum((0, 2)), rtol=1e-5, atol=1e-3)
