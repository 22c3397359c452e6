"""Which positions of a batch are padding, by its attention masks."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")
"""What the decoder of an encoder-decoder takes beside the encoder's output."""


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
    return None
