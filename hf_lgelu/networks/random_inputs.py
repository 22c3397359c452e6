"""Random inputs in the shapes that a model's config gives, where no real inputs are available."""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_lgelu.networks.run import require_taken

_TOKENS = 16
_SAMPLES = 16_000  # a second of speech
_PIXELS = 224  # pixels of a side, where neither the config nor the architecture gives a size


def random_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Keyword arguments for a forward pass of two samples, on the CPU: tokens, images, audio, time series or features.

    Numbers are standard normal, in the model's dtype; tokens are uniform over the vocabulary. Raises ValueError for a
    model whose main input is of another kind, or that does not take these inputs.
    """
    generator = torch.Generator().manual_seed(0)
    config = model.config
    accepted = inspect.signature(model.forward).parameters
    kinds = [model.main_input_name]
    if "pixel_values" in accepted and hasattr(config, "vision_config") and not model.can_generate():
        kinds.append("pixel_values")  # models like CLIP; models like LLaVA also run on text only
    if config.is_encoder_decoder and "decoder_input_ids" in accepted:
        kinds.append("decoder_input_ids")
    inputs: dict[str, Tensor] = {}
    for kind in dict.fromkeys(kinds):
        if kind in ("input_ids", "decoder_input_ids"):
            text = config.get_text_config()
            limit = getattr(text, "max_position_embeddings", None) or _TOKENS
            length = min(_TOKENS, limit) if limit > 0 else _TOKENS  # XLNet says -1 for no limit
            inputs[kind] = torch.randint(text.vocab_size, (2, length), generator=generator)
            continue
        shape: tuple[int, ...]
        if kind == "pixel_values":
            shape = _image_shape(model)
        elif kind == "features" and hasattr(config, "num_features"):
            shape = (config.num_features,)
        elif kind == "input_values":
            is_spectrogram = hasattr(config, "num_mel_bins") and hasattr(config, "patch_size")  # AST
            shape = (config.max_length, config.num_mel_bins) if is_spectrogram else (_SAMPLES,)
        elif kind == "input_features" and hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
            shape = (config.num_mel_bins, 2 * config.max_source_positions)  # Whisper's stem halves the length
        elif kind == "past_values" and hasattr(config, "num_input_channels"):
            shape = (config.context_length, config.num_input_channels)
        else:
            raise ValueError(
                f"no example inputs are known for {type(model).__name__}, which takes {kind!r}; pass some of your own, "
                "e.g. one batch as a dict of tensors"
            )
        inputs[kind] = torch.randn((2, *shape), generator=generator).to(model.dtype)
    if "input_ids" in inputs and "attention_mask" in accepted:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    require_taken(model, inputs, "random numbers in the shapes of its config")
    return inputs


def _image_shape(model: PreTrainedModel) -> tuple[int, ...]:
    config = getattr(model.config, "vision_config", model.config)
    channels = getattr(config, "num_channels", 3)
    size = getattr(config, "image_size", None)
    if hasattr(model, "timm_model"):
        # What prepares the images reads the config; timm's own is that of the published weights.
        own, published = (getattr(place, "pretrained_cfg", None) or {} for place in (config, model.timm_model))
        described = published | own
        channels, *size = described.get("input_size") or (3, _PIXELS, _PIXELS)
        size = getattr(getattr(model.timm_model, "patch_embed", None), "img_size", None) or size
    if size is None:
        size = _PIXELS  # a convolutional network takes any size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = getattr(config, "num_frames", None)  # models like VideoMAE
    return (channels, height, width) if frames is None else (frames, channels, height, width)
