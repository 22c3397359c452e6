import pytest
import torch
from families import FAMILIES
from family import main_output
from transformers import (
    ASTConfig,
    AutoModel,
    ConvNextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    VideoMAEConfig,
)

from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.networks.run import random_inputs

KINDS = ("bert", "t5", "vit", "wav2vec2", "clip", "patchtst")  # of inputs


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, id=one.name, marks=() if one.name in KINDS else pytest.mark.slow) for one in FAMILIES],
)
def test_every_family_runs_on_its_example_inputs(family):
    model = family.build().eval()
    with torch.no_grad():
        assert torch.isfinite(main_output(model(**random_inputs(model)))).all()


def test_shapes_follow_the_config_and_numbers_are_the_same_each_time():
    model = MLPForClassification(MLPConfig(num_features=7, hidden_size=3))
    inputs = random_inputs(model)
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {"features": (2, 7)}
    assert torch.equal(inputs["features"], random_inputs(model)["features"])
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=11, n_positions=6, bos_token_id=0, eos_token_id=0)
    tokens = random_inputs(GPT2LMHeadModel(config))["input_ids"]
    assert tokens.shape == (2, 6)  # no more than there are positions
    assert 0 <= tokens.min() <= tokens.max() < 11


def test_an_unknown_kind_of_input_is_named(monkeypatch):
    model = MLPForClassification(MLPConfig(num_features=7, hidden_size=3))
    monkeypatch.setattr(MLPForClassification, "main_input_name", "smells")
    with pytest.raises(ValueError, match="'smells'"):
        random_inputs(model)


VIT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (VideoMAEConfig(num_frames=4, image_size=16, patch_size=8, num_labels=2, **VIT), (2, 4, 3, 16, 16)),
        (ASTConfig(num_mel_bins=24, max_length=40, **VIT), (2, 40, 24)),
        (
            ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], image_size=32, dtype="bfloat16"),
            (2, 3, 32, 32),
        ),
    ],
    ids=["video", "spectrogram", "bfloat16"],
)
def test_videos_spectrograms_and_half_precision(config, shape):
    model = AutoModel.from_config(config).eval()
    (value,) = random_inputs(model).values()
    assert (tuple(value.shape), value.dtype) == (shape, model.dtype)


def test_images_of_timm_have_the_size_that_the_config_says_and_not_timms_default():
    config = TimmWrapperConfig(architecture="resnet18", model_args={"layers": (1, 1, 1, 1), "channels": (8, 8, 8, 8)})
    config.pretrained_cfg = {"input_size": [3, 32, 48]}  # what prepares the images reads this
    model = TimmWrapperForImageClassification(config).eval()
    assert model.timm_model.pretrained_cfg["input_size"] == (3, 224, 224)
    assert random_inputs(model)["pixel_values"].shape == (2, 3, 32, 48)


def test_what_a_model_does_not_take_is_told(monkeypatch):
    model = MLPForClassification(MLPConfig(num_features=7, hidden_size=3))
    model.config.num_features = 6
    with pytest.raises(ValueError, match=r"\(features: \(2, 6\) float32\)"):
        random_inputs(model)
