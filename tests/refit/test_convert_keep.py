"""Conversions that keep some gates: which ones, how they are saved, and what a process without the package says."""

import json

import pytest
import torch
from fresh_process import run_fresh
from loud_nets import bert, gpt2, tokens
from small_networks import convert_with
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import hf_lgelu
from hf_lgelu import convert_to_relu
from hf_lgelu.models.config_keys import UnsupportedConfigError
from hf_lgelu.networks.sites import find_sites


def mlp(**more):
    torch.manual_seed(0)
    config = hf_lgelu.MLPConfig(num_features=5, hidden_size=9, num_hidden_layers=3, num_labels=3, **more)
    return hf_lgelu.MLPForClassification(config).eval()


def rows(count=400):
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(1))


def test_the_named_gates_stay_and_the_report_says_which():
    _, report = convert_with(mlp(hidden_act="gelu"), rows(), keep=["layers.2.activation"], max_kl=None)
    assert (list(report.kept), list(report.gates)) == (
        ["layers.2.activation"],
        ["layers.0.activation", "layers.1.activation"],
    )
    assert "gates that stayed smooth: `layers.2.activation` (GELUActivation)" in str(report)


ELSEWHERE = """
import sys, torch, transformers
for folder, auto in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        getattr(transformers, auto).from_pretrained(folder)
    except Exception as error:
        print(type(error).__name__, str(error)[:200].replace(chr(10), " "))
    else:
        print("loaded")
assert "hf_lgelu" not in sys.modules
import hf_lgelu
for folder, auto in zip(sys.argv[1::2], sys.argv[2::2]):
    model = hf_lgelu.from_pretrained(getattr(transformers, auto), folder).eval()
    with torch.no_grad():
        given = model(**torch.load(folder + "/inputs.pt")).logits
    print(torch.equal(given, torch.load(folder + "/logits.pt")))
"""


def test_a_checkpoint_with_kept_gates_is_refused_without_the_package_and_rebuilt_with_it(tmp_path):
    called = []
    for build in (gpt2, bert):
        model = build()
        first = find_sites(model)[0]
        converted, report = convert_with(model, tokens(), keep=[first.name], max_kl=None)
        assert report.kept == {first.name: type(first.module).__name__}
        assert type(converted.get_submodule(first.name)) is type(first.module)
        folder = tmp_path / build.__name__
        converted.save_pretrained(folder)
        inputs = tokens(3)
        torch.save(inputs, folder / "inputs.pt")
        with torch.no_grad():
            torch.save(converted(**inputs).logits, folder / "logits.pt")
        auto = AutoModelForSequenceClassification if build is bert else AutoModelForCausalLM
        called += [str(folder), auto.__name__]
        saved = json.loads((folder / "config.json").read_text())
        assert {entry["site"] for entry in saved["lambda_gelu"]} == set(report.gates)
        assert "hf_lgelu.from_pretrained" in saved.values()
        (warning,) = (warning for warning in report.warnings if "the saved folder needs hf_lgelu" in warning)
        assert warning.endswith("Any other load ends in an error that names this function")
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    result = run_fresh(tmp_path / "elsewhere.py", *called)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = result.stdout.splitlines()
    assert len(lines) == 4
    assert all("hf_lgelu.from_pretrained" in line and "loaded" not in line for line in lines[:2])
    assert lines[2:] == ["True"] * 2


def test_kept_gates_of_another_form_or_with_hardness_come_back(tmp_path):
    for name in ("quick_gelu", "silu", "lambda_gelu"):
        model = mlp(hidden_act=name)
        converted, _ = convert_with(model, rows(), keep=["layers.1.activation"], max_kl=None)
        converted.save_pretrained(tmp_path / name)
        again = hf_lgelu.from_pretrained(hf_lgelu.MLPForClassification, tmp_path / name).eval()
        kinds = [type(layer.activation) for layer in again.layers]
        assert kinds == [nn.ReLU, type(model.layers[1].activation), nn.ReLU]
        assert torch.equal(again(rows(9)).logits, converted(rows(9)).logits)
        again.save_pretrained(tmp_path / "again")
        again = hf_lgelu.from_pretrained(hf_lgelu.MLPForClassification, tmp_path / "again").eval()
        assert torch.equal(again(rows(9)).logits, converted(rows(9)).logits)
        kind = find_sites(again)[0].kind
        hf_lgelu.substitute_relu(again, kinds=(kind,))  # the record goes with the last kept gate
        assert again.config.hidden_act == "relu"
        assert not hasattr(again.config, "lambda_gelu")


def test_a_record_that_names_no_activation_is_refused(tmp_path):
    converted, _ = convert_with(mlp(hidden_act="gelu"), rows(), keep=["layers.2.activation"], max_kl=None)
    converted.save_pretrained(tmp_path)
    for entry, told in (
        ({"activation": "no_such"}, "no activation"), ({"activation": "leaky_relu", "negative_slope": 0.1}, "version"),
    ):  # fmt: skip
        config = json.loads((tmp_path / "config.json").read_text())
        config["lambda_gelu"][0] = {"site": config["lambda_gelu"][0]["site"]} | entry
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=told):
            hf_lgelu.from_pretrained(hf_lgelu.MLPForClassification, tmp_path)


@pytest.mark.parametrize("gate", [nn.ELU(0.7), nn.LeakyReLU(0.1)], ids=repr)
def test_a_kept_gate_that_no_config_can_say_is_refused(gate):
    model = mlp(hidden_act="silu")
    model.layers[1].activation = gate
    with pytest.raises(UnsupportedConfigError, match=f"{type(gate).__name__} as it is here"):
        convert_with(model, rows(), keep=["layers.1.activation"], max_kl=None)


def test_a_softplus_that_makes_a_scale_stays_and_one_before_a_map_does_not():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.mean, self.scale = nn.Linear(5, 16), nn.Linear(16, 2), nn.Linear(16, 2)
            self.hidden, self.positive = nn.Softplus(), nn.Softplus()

        def forward(self, x):
            x = self.hidden(self.a(x))
            return {"values": self.mean(x) / self.positive(self.scale(x))}

    converted, report = convert_to_relu(Scaled(), rows())
    assert (list(report.gates), report.kept) == (["hidden"], {"positive": "Softplus"})
    hidden = torch.relu(converted.a(rows()))
    scale = nn.functional.softplus(converted.scale(hidden))
    torch.testing.assert_close(converted(rows())["values"], converted.mean(hidden) / scale)
