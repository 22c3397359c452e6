"""Which positions are padding, held against transformers' own arithmetic and against plain counting."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    GPT2Model,
    Wav2Vec2Config,
)

from hf_lgelu.networks.masks import counted_rows, mask_over, pad_tokens

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 20}


def decoder(**tokens):
    return GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=30, bos_token_id=0, eos_token_id=0, **tokens)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (GPT2Model(decoder(pad_token_id=29)), {"input_ids": 29, "decoder_input_ids": 29}),
        (GPT2Model(decoder(pad_token_id=None)), {}),
        (BertModel(BertConfig(**SMALL, pad_token_id=3)), {"input_ids": 3, "decoder_input_ids": 3}),
        (nn.Sequential(GPT2Model(decoder(pad_token_id=29))), {"input_ids": 29, "decoder_input_ids": 29}),
        (nn.Linear(2, 2), {}),
    ],
)
def test_the_token_is_that_of_the_config(model, expected):
    assert pad_tokens(model) == expected


@pytest.mark.parametrize(("own", "whole", "expected"), [(7, None, 7), (None, 5, 5)])
def test_encoder_and_decoder_have_their_own_or_that_of_the_whole(own, whole, expected):
    encoder = BertConfig(**SMALL, pad_token_id=3)
    both = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder(pad_token_id=own))
    both.pad_token_id = whole
    assert pad_tokens(EncoderDecoderModel(both)) == {"input_ids": 3, "decoder_input_ids": expected}


def test_a_token_that_the_vocabulary_does_not_have_is_none():
    model = GPT2Model(decoder(pad_token_id=29))
    model.config.pad_token_id = 30
    assert pad_tokens(model) == {}


@pytest.mark.parametrize(("steps", "frames"), [(12, 3), (12, 12), (13, 3), (480, 47)])
def test_a_frame_has_what_the_last_of_its_steps_has(steps, frames):
    lengths = torch.arange(1, steps + 1)
    mask = (torch.arange(steps) < lengths[:, None]).long()
    expected = [[(frame + 1) * steps <= length * frames for frame in range(frames)] for length in lengths.tolist()]
    assert mask_over(mask, (len(mask), frames), {"input_values": mask}).tolist() == expected


def test_values_of_another_number_of_sounds_have_no_mask():
    mask = torch.ones(2, 8)  # SEW-D's layers also take relative positions, as one sequence
    assert mask_over(mask, (1, 4), {"input_values": mask}) is None


@pytest.mark.parametrize("samples", [4_000, 16_000, 160_000])
def test_frames_are_those_of_wav2vec2_but_for_one_at_the_end(samples):
    lengths = torch.linspace(samples // 4, samples, 50).long()
    mask = (torch.arange(samples) < lengths[:, None]).long()
    config, expected = Wav2Vec2Config(), lengths
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        expected = (expected - kernel) // stride + 1
    frames = int(expected[-1])
    found = mask_over(mask, (len(mask), frames), {"input_values": mask}).sum(1)
    assert (found - expected).abs().max() <= 1
    assert 1 < expected.min() < expected.max() == frames


SOUND = {"input_values": torch.zeros(2, 8), "attention_mask": torch.tensor([[1] * 8, [1, 1, 1, 1, 1, 0, 0, 0]])}
SPECTRUM = {"input_features": torch.zeros(2, 8, 3), "attention_mask": SOUND["attention_mask"]}
FRAMES = [[True] * 4, [True, True, False, False]]


@pytest.mark.parametrize(
    ("inputs", "shape", "expected"),
    [
        (SOUND, (2, 4, 5), FRAMES),
        (SPECTRUM, (2, 4, 5), FRAMES),
        (SOUND, (2, 5), None),  # one row a sound
        (SOUND, (2, 5, 4, 3), None),  # a map of two axes
        ({"input_features": torch.zeros(2, 3, 8), "attention_mask": SOUND["attention_mask"]}, (2, 4, 5), None),
        ({"input_ids": torch.zeros(2, 8), "attention_mask": SOUND["attention_mask"]}, (2, 4, 5), None),
    ],
)
def test_only_what_is_made_of_sound_has_its_mask(inputs, shape, expected):
    found = counted_rows(inputs, torch.zeros(shape), "encoder.layers.0", channels_last=True)
    assert (None if found is None else found.tolist()) == expected
    assert counted_rows(inputs, torch.zeros(shape), "encoder.layers.0") is None  # it may be (B, channels, T)
