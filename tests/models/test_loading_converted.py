"""Converted models whose config has no key for their gates: a saved folder loads as the network that was saved."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import MptConfig, MptForCausalLM, PreTrainedConfig, PreTrainedModel

import hf_lgelu
from hf_lgelu.networks.sites import SMOOTH_KINDS, find_sites
from hf_lgelu.refit.task import Exchange


class OwnConfig(PreTrainedConfig):
    model_type = "own_without_a_key"


class Swish(nn.Module):
    def forward(self, x):
        return x * x.sigmoid()


class Own(PreTrainedModel):
    """Gates in the code, of every form, whatever the config says."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.PReLU(12), nn.Linear(12, 8), Swish(), nn.Linear(8, 6))
        self.act, self.head = F.gelu, nn.Linear(6, 3)
        self.post_init()

    def forward(self, x):
        return {"logits": self.head(self.act(self.net(x)))}


def own():
    return Own(OwnConfig()), {"x": torch.randn(96, 6)}


def mpt():
    sizes = {"d_model": 8, "n_heads": 2, "n_layers": 2, "vocab_size": 9, "max_seq_len": 16}
    return MptForCausalLM(MptConfig(**sizes, initializer_range=0.5)), {"input_ids": torch.randint(9, (32, 8))}


def unet():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=4, in_channels=1, out_channels=1, block_out_channels=(8,), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), add_attention=False,
    )  # fmt: skip
    return model, {"sample": torch.randn(70, 1, 4, 4), "timestep": torch.randint(999, (70,))}


def exchanged(model):
    """A copy of the model with the gates of a conversion, and all else as it was."""
    copy_of_it = copy.deepcopy(model)
    Exchange(SMOOTH_KINDS, ()).carry_out(copy_of_it)
    return copy_of_it


@pytest.mark.parametrize("build", [own, mpt])
def test_a_folder_loads_as_the_network_that_was_saved(build, tmp_path):
    model, inputs = build()
    converted = exchanged(model.eval())
    converted.save_pretrained(tmp_path / "first")
    loaded = hf_lgelu.from_pretrained(type(model), tmp_path / "first").eval()
    loaded.save_pretrained(tmp_path / "second")
    again = hf_lgelu.from_pretrained(type(model), tmp_path / "second").eval()
    with torch.no_grad():
        given, *others = (next(iter(network(**inputs).values())) for network in (converted, loaded, again))
    assert (given - next(iter(model(**inputs).values()))).abs().max() > 1e-5
    assert all(torch.equal(given, other) for other in others)
    file = json.loads((tmp_path / "second" / "config.json").read_text())
    assert {entry["site"] for entry in file["lambda_gelu"]} == {site.name for site in find_sites(model)}


@pytest.mark.parametrize("convert", [True, False])
def test_of_diffusers_it_is_said_that_no_gates_are_saved(convert, tmp_path, monkeypatch):
    """Its config keeps the old gates: what plain diffusers loads computes what the weights would with them."""
    said = []
    monkeypatch.setattr("hf_lgelu.models.surgery.logger.warning", said.append)
    model, inputs = unet()
    if convert:
        model, report = hf_lgelu.convert_to_relu(model.eval(), inputs)
        said = report.warnings
    else:
        hf_lgelu.replace_activations(model.eval())
    assert sum("UNet2DModel.from_pretrained builds the gates of its code and config" in each for each in said) == 1
    model.save_pretrained(tmp_path / "saved")
    assert {site.kind for site in find_sites(type(model).from_pretrained(tmp_path / "saved"))} == {"silu"}


def test_weights_of_neither_name_are_missed_by_their_usual_name(tmp_path):
    exchanged(mpt()[0].eval()).config.save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        hf_lgelu.from_pretrained(MptForCausalLM, tmp_path)
