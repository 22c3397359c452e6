"""Which positions of a batch are padding, by its attention masks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")
"""What the decoder of an encoder-decoder takes beside the encoder's output."""


SOUND_INPUTS = ("input_values", "input_features")
"""What audio networks listen to; behind their first layers many of its steps are one."""


def counted_rows(inputs: Mapping[str, Any], values: Tensor, part: str) -> Tensor | None:
    """Which rows of `values` are no padding: a mask of all axes but the last, or None for all of them.

    Where the decoder was given inputs of its own, the encoder's mask says nothing of what is behind it, even where
    both are as long.

    Args:
        inputs: of the model, by name; the masks are among them.
        values: what the network has at some place.
        part: the name of the output, module or weight there.
    """
    masks: tuple[str, ...] = ("attention_mask", "decoder_attention_mask")
    if any(step.startswith("encoder") for step in part.split(".")):
        masks = masks[:1]
    elif any(given in inputs for given in DECODER_INPUTS):
        masks = masks[1:]
    for mask in (inputs.get(name) for name in masks):
        if isinstance(mask, Tensor) and mask.shape == values.shape[:-1]:
            return mask.bool().to(values.device)
        if isinstance(mask, Tensor) and values.ndim == 3 and is_of_sound(mask, inputs):
            return mask_of_frames(mask, values.shape[1]).to(values.device)
    return None


def is_of_sound(mask: Tensor, inputs: Mapping[str, Any]) -> bool:
    """Whether the mask (B, T) is that of the steps of a `SOUND_INPUTS`, whose values may be tensors of any kind."""
    return any(inputs[name].shape[:2] == mask.shape for name in SOUND_INPUTS if name in inputs)


def mask_of_frames(mask: Tensor, frames: int) -> Tensor:
    """The mask (B, T) for `frames` positions that share its T steps evenly: at each what the last of its steps has.

    Convolutions without padding make a few frames less, so that where a sound ends one may be missed.
    """
    steps = mask.shape[1]
    last = (torch.arange(1, frames + 1, device=mask.device) * steps - 1) // frames
    return mask[:, last].bool()
