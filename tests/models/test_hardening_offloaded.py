"""Gates whose values accelerate keeps on a disk or off the device: λ is read there, and a warning names soft gates."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import nn

from hf_lgelu import (
    MLPConfig,
    MLPForClassification,
    anneal_hardness,
    export_gelu,
    export_relu,
    hardness_profile,
    initialize_hardness,
    replace_activations,
    substitute_relu,
)
from hf_lgelu.models.hardening import is_hardened, release_hardness
from hf_lgelu.networks.smooth_calls import find_smooth_calls

ROWS = {"features": torch.ones(2, 3)}


def network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    replace_activations(net, init_hardness=2.0)
    return net.eval()


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_hardness_is_read_where_it_is_kept(place, tmp_path, caplog):
    net = network()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        net[1].raw_hardness += 0.1  # two gates that differ, where they are two
        before = net(x)
    expected = hardness_profile(net)
    assert 2 < expected["1"] < 4
    if place == "cpu":
        cpu_offload(net, execution_device=torch.device("cpu"))
    else:
        disk_offload(net, tmp_path, execution_device=torch.device("cpu"))
    assert net[1].raw_hardness.is_meta
    assert hardness_profile(net) == pytest.approx(expected)
    assert not is_hardened(net)
    assert net[1].raw_hardness.is_meta  # still kept there
    assert torch.equal(net(x), before)
    report = substitute_relu(net)
    assert {name: gate.hardness for name, gate in report.gates.items()} == pytest.approx(expected)
    assert "2 of the 2 gates that became ReLU were soft" in caplog.text


CHANGES = {
    "export_relu": lambda model, folder: export_relu(model, folder / "out", inputs=ROWS),
    "export_gelu": lambda model, folder: export_gelu(model, folder / "out", inputs=ROWS),
    "anneal_hardness": lambda model, folder: anneal_hardness(model, 0.5),
    "initialize_hardness": lambda model, folder: initialize_hardness(model, "increasing"),
    "release_hardness": lambda model, folder: release_hardness(model),
    "replace_activations": lambda model, folder: replace_activations(model, kinds=("lambda_gelu",)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_would_change_or_copy_values_says_that_they_are_elsewhere(name, tmp_path):
    """What is written into a module that has its values elsewhere is gone with its next forward."""
    model = MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=2)).eval()
    anneal_hardness(model, 1.0)
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    before = model(**ROWS).logits
    with pytest.raises(RuntimeError, match=r"accelerate.*layers\.0\."):
        CHANGES[name](model, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(model(**ROWS).logits, before)
    assert is_hardened(model)


@pytest.mark.parametrize("kept", ["all", "a part"])
def test_inputs_reach_a_model_whose_values_are_elsewhere(kept):
    """Its first parameter is on the device "meta", where no input may go."""
    whole, x = network(), torch.randn(64, 3)
    net = nn.Sequential(whole[:2], whole[2:])
    calls = find_smooth_calls(net, x)
    cpu_offload(net if kept == "all" else net[0], execution_device=torch.device("cpu"))
    assert next(net.parameters()).is_meta
    assert find_smooth_calls(net, x) == calls
    assert len(calls) == 2
