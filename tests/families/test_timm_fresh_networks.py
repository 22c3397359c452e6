"""A converted network of timm in fresh code: its gates are swapped by name, then its state dict is loaded."""

import copy

import pytest
import torch
from torch import nn

import hf_lgelu
from hf_lgelu.networks.sites import SMOOTH_KINDS, find_sites
from hf_lgelu.refit.task import Exchange

timm = pytest.importorskip("timm")


@pytest.mark.parametrize(
    ("name", "side", "sizes"),
    [
        ("gcvit_xxtiny", 224, {}),  # act_layer="relu" leaves 20 of its 34 gates smooth
        ("mambaout_femto", 32, {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 20)}),  # one
        ("efficientvit_b0", 32, {}),  # which refuse the string
        ("inception_next_atto", 32, {}),
    ],
)
@torch.no_grad()
def test_swapped_gates_and_the_state_dict_are_the_whole_network(name, side, sizes):
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=3, **sizes).eval()
    converted, images = copy.deepcopy(network), torch.randn(2, 3, side, side)
    gates = [site.name for site in find_sites(network, SMOOTH_KINDS)]
    Exchange(SMOOTH_KINDS, ()).carry_out(converted)
    fresh = timm.create_model(name, num_classes=3, **sizes).eval()
    for gate in gates:
        fresh.set_submodule(gate, nn.ReLU())
    fresh.load_state_dict(converted.state_dict())
    assert torch.equal(fresh(images), converted(images))
    assert (network(images) - converted(images)).abs().max() > 1e-2


def test_the_report_of_a_bare_module_names_this_road():
    bare = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    sizes = {"num_features": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_labels": 3, "hidden_act": "gelu"}
    said = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(**sizes))
    x = torch.randn(200, 4)
    of_bare, of_said = (str(hf_lgelu.convert_to_relu(model, x).report) for model in (bare, said))
    assert "put ReLU into the fresh network at each name in `report.gates`" in of_bare
    assert "fresh network" not in of_said
