"""What counts of a model's outputs and of a batch: what the task reads, labels, and positions that are no padding."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

IGNORED_LABEL = -100
"""The label of what nothing predicts, and what the labels of sequences are padded with: cross entropy ignores it."""

# By the names that transformers and sentence-transformers give them. Class scores come first: the first is compared.
_CLASS_SCORES = ("logits", "start_logits", "end_logits", "class_queries_logits", "prediction_logits")
_READ = (
    *_CLASS_SCORES,
    *("seq_relationship_logits", "pred_boxes", "pred_masks", "iou_scores", "masks_queries_logits"),
    *("logits_per_image", "logits_per_text", "text_embeds", "image_embeds", "sentence_embedding", "embeddings"),
    *("predicted_depth", "reconstruction", "prediction_outputs", "spectrogram", "waveform", "audio_values"),
)
_BESIDE = frozenset(
    (
        *("loss", "hidden_states", "attentions", "cross_attentions", "past_key_values", "cache_params", "aux_loss"),
        *("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions", "decoder_hidden_states"),
        *("decoder_attentions", "feature_maps"),
    )
)


def task_outputs(output: Any, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The floating-point tensors of an output that count, by name; the first is the one that is compared closest.

    Of an output with names (a mapping) those that a task reads, and where it has none of these, all but hidden states,
    attentions, caches and losses. Of a tensor that tensor, "" by name; of a tuple or list all, "0", "1" and so on;
    deeper ones are "name.0".

    Args:
        output: what a model gave.
        names: count these instead, and what is in them.

    Raises ValueError where a name is not there, or none is given.
    """
    found = dict(_named(output, ""))
    if names is not None:
        if not names:
            raise ValueError("outputs names no output that counts; leave it out for those that the task reads")
        missing = [name for name in names if not any(_is_in(given, name) for given in found)]
        if missing:
            there = [name or "a tensor without a name, which counts where outputs is left out" for name in found]
            raise ValueError(
                f"outputs={list(names)}: the model gives no floating-point output {', '.join(map(repr, missing))}; it "
                f"gives {', '.join(there) or 'none'}"
            )
        return {given: found[given] for name in names for given in found if _is_in(given, name)}
    if not isinstance(output, Mapping):
        return found
    read = {given: found[given] for name in _READ for given in found if _is_in(given, name)}
    return read or _not_beside(found)


def uncounted_outputs(output: Any) -> dict[str, Tensor]:
    """Those that `task_outputs` leaves out though nothing says that they are on the way to others.

    That is known of hidden states, attentions, caches and losses, and of all that transformers itself names beside.
    """
    if not isinstance(output, Mapping) or type(output).__module__.startswith("transformers."):
        return {}
    counted = task_outputs(output)
    return {given: value for given, value in _not_beside(dict(_named(output, ""))).items() if given not in counted}


def _not_beside(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {given: value for given, value in found.items() if given.partition(".")[0] not in _BESIDE}


def are_class_scores(name: str) -> bool:
    """Whether an output of this name holds a score for each class along its last axis; a bare tensor counts as such."""
    return name in ("", *_CLASS_SCORES)


def is_causal(model: nn.Module) -> bool:
    """Whether a model predicts the token behind each: a causal language model of transformers, or one that is built
    on one, or generates without an encoder's help (Llava and the like)."""
    if hasattr(model, "get_base_model"):  # an adapter of PEFT around it
        model = model.get_base_model()
    # Of these the mapping, and generation, say nothing: they are trained to predict a token at its own place.
    kind = getattr(getattr(model, "config", None), "model_type", "")
    if kind == "xlnet" or (kind in ("xlm", "flaubert") and not model.config.causal):
        return False
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if any(base.__name__ in names for base in type(model).__mro__):
        return True
    generates = isinstance(model, PreTrainedModel) and model.can_generate()
    return generates and not getattr(model.config, "is_encoder_decoder", False)


def labels_of_predictions(labels: Any, model: nn.Module) -> Any:
    """Labels such that each stands where it is predicted: those of a causal language model one place earlier, its last
    position predicting nothing. Anything else as it is."""
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point() or not is_causal(model):
        return labels
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED_LABEL)], dim=1)


def _is_in(given: str, name: str) -> bool:
    return given == name or given.startswith(f"{name}.")


def _named(output: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield prefix, output
        return
    entries: Iterable[tuple[Any, Any]]
    if isinstance(output, Mapping):
        entries = output.items()
    elif isinstance(output, list | tuple):
        entries = enumerate(output)
    else:
        return
    for name, value in entries:
        yield from _named(value, f"{prefix}.{name}" if prefix else str(name))


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
