"""SiLU and tanh-GELU networks: each site gets the gate whose λ = 1 it is, learns, hardens, and leaves as ReLU."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from families import BY_NAME
from family import enlarge, logits_of, main_output
from torch import nn

from hf_lgelu import anneal_hardness, hardness_parameter_groups, hardness_profile, replace_activations, substitute_relu
from hf_lgelu.activation.hardness import hardness_for_tolerance
from hf_lgelu.models.hardening import is_hardened
from hf_lgelu.networks.sites import find_sites, lambda_gelu_modules


@dataclass(frozen=True)
class SelfGated:
    """`build` makes the network with the activation of a name, `own`'s λ = 1 form being `gate`."""

    build: Callable[[str], nn.Module]
    own: str
    gate: str
    sites: int
    inputs: Callable[[], dict[str, torch.Tensor]]

    def model(self, activation: str | None = None) -> nn.Module:
        torch.manual_seed(0)
        return enlarge(self.build(activation or self.own))


def language_model(family: str, own: str, gate: str) -> SelfGated:
    row = BY_NAME[family]
    return SelfGated(row.build, own, gate, row.sites, row.inputs)


NETWORKS = {
    "llama": language_model("llama", "silu", "lambda_silu"),
    "gemma": language_model("gemma", "gelu_pytorch_tanh", "lambda_gelu_tanh"),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def hold_at(model, hardness):
    for _, module in lambda_gelu_modules(model):
        module.hardness_override.fill_(hardness)
    return model


@every_network
def test_each_site_gets_the_gate_whose_plain_form_it_is(name):
    row = NETWORKS[name]
    model, inputs = row.model(), row.inputs()
    plain = logits_of(model, inputs)
    report = replace_activations(model)
    assert {site.kind for site in find_sites(model)} == {row.gate}
    assert len(report) == len(hardness_profile(model)) == row.sites
    assert (logits_of(hold_at(model, 1.0), inputs) - plain).abs().max() <= 1e-5 * plain.abs().max()
    assert model.config.hidden_act == row.gate
    # In double precision λ = 1 is the same function, up to the order of sums.
    wide = row.model().double()
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    plain = logits_of(wide, inputs)
    replace_activations(wide)
    assert (logits_of(hold_at(wide, 1.0), inputs) - plain).abs().max() <= 1e-12 * plain.abs().max()


@every_network
def test_a_plain_checkpoint_loads_under_the_gates_name_and_is_its_own_function(name, tmp_path):
    row, model_class = NETWORKS[name], BY_NAME[name].model_class
    model, inputs = row.model(), row.inputs()
    plain = logits_of(model, inputs)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path, hidden_act=row.gate)
    assert list(hardness_profile(loaded).values()) == pytest.approx([1.05] * row.sites, rel=1e-6)
    assert (logits_of(hold_at(loaded.eval(), 1.0), inputs) - plain).abs().max() <= 1e-5 * plain.abs().max()
    # Saved soft and loaded again, it is what it was.
    anneal_hardness(loaded, 0.3)
    wanted = logits_of(loaded, inputs)
    loaded.save_pretrained(tmp_path / "soft")
    assert torch.equal(logits_of(model_class.from_pretrained(tmp_path / "soft"), inputs), wanted)


@every_network
def test_trained_hardened_and_substituted_it_is_a_plain_relu_network(name, tmp_path):
    row = NETWORKS[name]
    model, inputs = row.model(), row.inputs()
    replace_activations(model, init_hardness=1.2)
    before = hardness_profile(model)
    optimizer = torch.optim.SGD(hardness_parameter_groups(model.train(), 0.05))
    output = main_output(model(**inputs))
    output.float().square().mean().backward()
    optimizer.step()
    assert all(value != before[site] for site, value in hardness_profile(model.eval()).items())
    anneal_hardness(model, 1.0)
    target = hardness_for_tolerance(gate=row.gate)
    assert list(hardness_profile(model).values()) == pytest.approx([target] * row.sites, rel=1e-6)
    assert is_hardened(model)
    hard = logits_of(model, inputs)
    assert len(substitute_relu(model)) == row.sites
    relu = logits_of(model, inputs)
    assert (hard - relu).abs().max() <= 0.02 * relu.abs().max()
    plain = row.model("relu")
    plain.load_state_dict(model.state_dict(), strict=True)  # it has no tensor of a gate
    assert (logits_of(plain, inputs) - relu).abs().max() <= 1e-6 * relu.abs().max()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["hidden_act"] == "relu"
    assert "lambda" not in json.dumps(saved)
