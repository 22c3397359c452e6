"""What sequences are padded with, and which positions of a batch are padding, by its attention masks."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")
"""What the decoder of an encoder-decoder takes beside the encoder's output."""

SOUND_INPUTS = ("input_values", "input_features")
"""What audio networks listen to; behind their first layers many of its steps are one."""


def counted_rows(inputs: Mapping[str, Any], values: Tensor, part: str, *, channels_last: bool = False) -> Tensor | None:
    """Which rows of `values` are no padding: a mask of all axes but the last, or None for all of them.

    Where the decoder was given inputs of its own, the encoder's mask says nothing of what is behind it, even where
    both are as long.

    Args:
        inputs: of the model, by name; the masks are among them.
        values: what the network has at some place.
        part: the name of the output, module or weight there.
        channels_last: whether the last axis is known to hold channels. Only then the positions of a (B, T, C) can be
            the frames of a sound: a convolution has (B, C, T).
    """
    masks: tuple[str, ...] = ("attention_mask", "decoder_attention_mask")
    if any(step.startswith("encoder") for step in part.split(".")):
        masks = masks[:1]
    elif any(given in inputs for given in DECODER_INPUTS):
        masks = masks[1:]
    for mask in (inputs.get(name) for name in masks):
        if isinstance(mask, Tensor) and mask.shape == values.shape[:-1]:
            return mask.bool().to(values.device)
        if channels_last and isinstance(mask, Tensor) and values.ndim == 3 and is_of_sound(mask, inputs):
            return mask_of_frames(mask, values.shape[1]).to(values.device)
    return None


def pad_tokens(model: nn.Module) -> dict[str, int]:
    """{input: the token that it is padded with}, by the model's config: what it looks for where it has to know.

    A classifier on a decoder takes the last token that is none of these, whatever the attention mask says.
    """
    configs = (getattr(module, "config", None) for module in model.modules())  # a network of one's own may hold one
    config = next((found for found in configs if isinstance(found, PreTrainedConfig)), None)
    if config is None:
        return {}
    parts = {"input_ids": getattr(config, "encoder", None), "decoder_input_ids": getattr(config, "decoder", None)}
    tokens: dict[str, int | None] = {}
    for name, part in parts.items():
        own = _pad_token(part) if isinstance(part, PreTrainedConfig) else None
        tokens[name] = _pad_token(config) if own is None else own
    return {name: token for name, token in tokens.items() if token is not None}


def _pad_token(config: PreTrainedConfig) -> int | None:
    try:
        text = config.get_text_config()
    except ValueError:  # it has several
        return None
    token, vocabulary = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    token = getattr(config, "pad_token_id", None) if token is None else token
    is_one = isinstance(token, int) and token >= 0 and (not isinstance(vocabulary, int) or token < vocabulary)
    return token if is_one else None


def frames_of_sound(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """How many frames an audio network of transformers makes of so many steps, where it says so."""
    for module in model.modules():
        count = getattr(module, "_get_feat_extract_output_lengths", None)
        if callable(count):
            return partial(_last_of, count)
    return None


def _last_of(count: Callable[[Tensor], Any], steps: Tensor) -> Tensor:
    found = count(steps)
    return found[-1] if isinstance(found, tuple) else found  # some give what their convolutions make, then the rest


def is_of_sound(mask: Tensor, inputs: Mapping[str, Any]) -> bool:
    """Whether the mask (B, T) is that of the steps of a `SOUND_INPUTS`: (B, T) or (B, T, features)."""
    sounds = (inputs.get(name) for name in SOUND_INPUTS)
    return any(isinstance(sound, Tensor) and sound.shape[:2] == mask.shape for sound in sounds)


def mask_of_frames(mask: Tensor, frames: int) -> Tensor:
    """The mask (B, T) for `frames` positions that share its T steps evenly: at each what the last of its steps has.

    Convolutions without padding make a few frames less, so that where a sound ends one may be missed.
    """
    steps = mask.shape[1]
    last = (torch.arange(1, frames + 1, device=mask.device) * steps - 1) // frames
    return mask[:, last].bool()
