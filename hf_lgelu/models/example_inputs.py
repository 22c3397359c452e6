"""Random inputs of the shape that a model's config asks for, where no real ones are at hand."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_TOKENS = 16
_SAMPLES = 16_000  # a second of speech


def example_inputs(model: PreTrainedModel, *, batch_size: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Keyword arguments for one forward pass, on the CPU: token ids, pixels, audio or features.

    Numbers are standard normal, tokens uniform over the vocabulary; real inputs say more.

    Raises ValueError for a model whose main input is of another kind.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    kind = model.main_input_name
    if kind == "input_ids":
        tokens = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
        vocabulary = config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (batch_size, tokens), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(vocabulary, (batch_size, tokens), generator=generator)
        return inputs
    shape = _shape(kind, config)
    if shape is None:
        raise ValueError(
            f"no example inputs are known for {type(model).__name__}, whose main input is {kind!r}; pass some of your "
            "own, e.g. one batch as a dict of tensors"
        )
    return {kind: torch.randn((batch_size, *shape), generator=generator)}


def _shape(kind: str, config: Any) -> tuple[int, ...] | None:
    if kind == "features" and hasattr(config, "num_features"):
        return (config.num_features,)
    if kind == "input_values":
        return (_SAMPLES,)
    if kind == "pixel_values":
        return _image_shape(config)
    return None


def _image_shape(config: Any) -> tuple[int, ...] | None:
    timm_size = (getattr(config, "pretrained_cfg", None) or {}).get("input_size")
    if timm_size:
        return tuple(timm_size)
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    if size is None and hasattr(config, "architecture"):
        return (3, 224, 224)  # timm's own default
    if size is None and hasattr(vision, "num_channels"):
        return (vision.num_channels, 224, 224)  # a convolutional network takes any size
    if size is None:
        return None
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return (getattr(vision, "num_channels", 3), height, width)
