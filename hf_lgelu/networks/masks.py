"""The rows of a network's values that are not padding, found from the masks among its inputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")
"""The inputs of the decoder of an encoder-decoder, without the encoder's output."""


_SOUND_INPUTS = ("input_values", "input_features")  # of audio networks, which make one frame from many steps
MASKS = ("attention_mask", "decoder_attention_mask")


def counted_rows(inputs: Mapping[str, Any], values: Tensor, part: str, *, channels_last: bool = False) -> Tensor | None:
    """The mask of the rows of `values` that are no padding, over all axes but the last; None where all rows count.

    Where the decoder has inputs of its own, the encoder's mask says nothing about the decoder's values, even if both
    sequences are equally long.

    `part` names the output, or the module or weight, that gives `values`. With `channels_last` their last axis is known
    to hold channels. Only then can the positions of (B, T, C) be the frames of a sound: a convolution has (B, C, T).
    """
    masks: tuple[str, ...] = MASKS
    if any(step.startswith("encoder") for step in part.split(".")):
        masks = masks[:1]
    elif any(given in inputs for given in DECODER_INPUTS):
        masks = masks[1:]
    for mask in (inputs.get(name) for name in masks):
        if isinstance(mask, Tensor):
            counted = mask_over(mask, values.shape[:-1], inputs if channels_last else {})
            if counted is not None:
                return counted.to(values.device)
    return None


def mask_over(mask: Tensor, axes: Sequence[int], inputs: Mapping[str, Any]) -> Tensor | None:
    """The mask (B, T) for positions with these axes: (B, T), or (B, frames) of a sound among the inputs; else None."""
    if mask.shape == tuple(axes):
        return mask.bool()
    if len(axes) != 2 or axes[0] != len(mask) or not is_of_sound(mask, inputs):
        return None
    # A frame counts if the last of its steps does. The steps are assumed to be shared evenly among frames. Convolutions
    # without padding may miss the last frame.
    last = (torch.arange(1, axes[1] + 1, device=mask.device) * mask.shape[1] - 1) // axes[1]
    return mask[:, last].bool()


def is_of_sound(mask: Tensor, inputs: Mapping[str, Any]) -> bool:
    """Whether the mask (B, T) belongs to the steps of a sound, (B, T) or (B, T, features)."""
    sounds = (inputs.get(name) for name in _SOUND_INPUTS)
    return any(isinstance(sound, Tensor) and sound.shape[:2] == mask.shape for sound in sounds)


def pad_tokens(model: nn.Module) -> dict[str, int]:
    """{input: its padding token} from the model's config; a classifier on a decoder reads the last other token."""
    configs = (getattr(module, "config", None) for module in model.modules())  # a user's own network may hold a config
    config = next((found for found in configs if isinstance(found, PreTrainedConfig)), None)
    found: dict[str, int] = {}
    for name, part in (("input_ids", "encoder"), ("decoder_input_ids", "decoder")):
        for own in (getattr(config, part, None), config):
            if not isinstance(own, PreTrainedConfig):
                continue
            try:
                text = own.get_text_config()
            except ValueError:  # the config has several
                continue
            token = getattr(text, "pad_token_id", None)
            token = getattr(own, "pad_token_id", None) if token is None else token
            vocabulary = getattr(text, "vocab_size", None)
            if isinstance(token, int) and 0 <= token < (vocabulary if isinstance(vocabulary, int) else math.inf):
                found.setdefault(name, token)
    return found


def frames_of_sound(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """For an audio network of transformers, the function from lengths of sounds to numbers of frames; else None."""
    for module in model.modules():
        count = getattr(module, "_get_feat_extract_output_lengths", None)
        if callable(count):
            # Some take a single length. Some give a tuple: the length after their convolutions, and last what remains.
            return lambda steps: torch.tensor(
                [int(found[-1] if isinstance(found := count(each), tuple) else found) for each in steps]
            )
    return None
