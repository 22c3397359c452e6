"""SiLU and tanh-GELU families: each site gets the gate that it is, learns, hardens, and leaves as ReLU."""

import json
from pathlib import Path

import pytest
import torch
from family import logits_of, main_output
from fresh_process import run_fresh
from safetensors.torch import save_file
from self_gated_families import FAMILIES

from hf_lgelu import (
    anneal_hardness,
    hardness_for_tolerance,
    hardness_parameter_groups,
    hardness_profile,
    replace_activations,
    substitute_relu,
)
from hf_lgelu.models.hardening import is_hardened
from hf_lgelu.models.sites import find_sites, lambda_gelu_modules

HERE = Path(__file__).parent

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
by_string = pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.sizes], ids=lambda family: family.name)


def hold_at(model, hardness):
    for _, module in lambda_gelu_modules(model):
        module.hardness_override.fill_(hardness)
    return model


@every_family
def test_each_site_gets_the_gate_whose_plain_form_it_is(family):
    model = family.build()
    plain = logits_of(model, family.inputs())
    report = replace_activations(model)
    assert {site.kind for site in find_sites(model)} == {family.gate}
    assert len(report) == len(hardness_profile(model)) == family.sites
    largest = plain.abs().max()
    assert (logits_of(hold_at(model, 1.0), family.inputs()) - plain).abs().max() <= 1e-5 * largest
    if family.sizes:
        assert getattr(model.config, family.key[0]) == family.gate
    # In double precision λ = 1 is the same function, up to the order of sums.
    wide = family.build().double()
    inputs = {name: x.double() if x.is_floating_point() else x for name, x in family.inputs().items()}
    plain = logits_of(wide, inputs)
    replace_activations(wide)
    assert (logits_of(hold_at(wide, 1.0), inputs) - plain).abs().max() <= 1e-12 * plain.abs().max()


@by_string
def test_a_plain_checkpoint_loads_under_the_gates_name_and_is_its_own_function(family, tmp_path):
    model = family.build()
    plain = logits_of(model, family.inputs())
    model.save_pretrained(tmp_path)
    loaded, info = family.model_class.from_pretrained(
        tmp_path, **{family.key[0]: family.gate}, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert list(hardness_profile(loaded).values()) == pytest.approx([1.05] * family.sites, rel=1e-6)
    assert (logits_of(hold_at(loaded.eval(), 1.0), family.inputs()) - plain).abs().max() <= 1e-5 * plain.abs().max()
    # Saved soft and loaded again, it is what it was.
    anneal_hardness(loaded, 0.3)
    wanted = logits_of(loaded, family.inputs())
    loaded.save_pretrained(tmp_path / "soft")
    again = family.model_class.from_pretrained(tmp_path / "soft")
    assert torch.equal(logits_of(again, family.inputs()), wanted)


def step(model, family):
    """One step of training on random targets."""
    model.train()
    optimizer = torch.optim.SGD(hardness_parameter_groups(model, 0.05), lr=0.05)
    output = main_output(model(**family.inputs())) if family.sizes else model(*family.inputs().values())
    (output.float() ** 2).mean().backward()
    before = [module.raw_hardness.item() for _, module in lambda_gelu_modules(model)]
    optimizer.step()
    after = [module.raw_hardness.item() for _, module in lambda_gelu_modules(model)]
    model.eval()
    return before, after


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """{family: (logits when hard, with ReLU here, with ReLU in a process without hf_lgelu)}, from one process."""
    root = tmp_path_factory.mktemp("relu")
    here = {name: leave(family, root / name) for name, family in FAMILIES.items()}
    done = run_fresh(HERE / "self_gated_families.py", root)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(root / "logits.pt")
    assert found["modules"] == []
    return {name: (*logits, found["logits"][name]) for name, logits in here.items()}


def leave(family, folder):
    model = family.build()
    replace_activations(model, init_hardness=1.2)
    before, after = step(model, family)
    assert all(a != b for a, b in zip(after, before, strict=True))
    anneal_hardness(model, 1.0)
    target = hardness_for_tolerance(gate=family.gate)
    assert list(hardness_profile(model).values()) == pytest.approx([target] * family.sites, rel=1e-6)
    assert is_hardened(model, fraction=1.0)
    hard = logits_of(model, family.inputs())
    assert len(substitute_relu(model)) == family.sites
    if family.sizes:
        model.save_pretrained(folder)
        assert "lambda" not in json.dumps(json.loads((folder / "config.json").read_text()))
    else:
        folder.mkdir()
        save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(family.inputs(), folder / "inputs.pt")
    return hard, logits_of(model, family.inputs())


@every_family
def test_hardened_and_substituted_it_is_a_relu_network_without_hf_lgelu(family, elsewhere):
    hard, relu, relu_elsewhere = elsewhere[family.name]
    assert (hard - relu).abs().max() <= 0.02 * relu.abs().max()
    assert (relu_elsewhere - relu).abs().max() <= 1e-6 * relu.abs().max()
