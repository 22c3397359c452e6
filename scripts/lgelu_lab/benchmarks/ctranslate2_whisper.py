"""A Whisper network out of CTranslate2's file of it, the form in which faster-whisper and its kin carry weights."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import WhisperForConditionalGeneration, WhisperProcessor

_VERSION = 6
_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_START, _END, _NO_TIMESTAMPS = "<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>"


def load_whisper(folder: Path) -> tuple[WhisperForConditionalGeneration, WhisperProcessor]:
    """The network in float32 of a folder with model.bin, config.json and tokenizer.json, and its processor.

    Only English ones with weights that are not quantized. Raises ValueError where the file is of another version.
    """
    weights = read_weights(folder / "model.bin")
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = transformers.WhisperTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=_END, eos_token=_END, pad_token=_END, unk_token=_END
    )
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (_START, _END, _NO_TIMESTAMPS)}
    model = WhisperForConditionalGeneration(_config(weights, ids))
    model.load_state_dict(dict(_renamed(weights, model.config)))
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=ids[_START], bos_token_id=ids[_END], eos_token_id=ids[_END], pad_token_id=ids[_END],
        suppress_tokens=told["suppress_ids"], begin_suppress_tokens=told["suppress_ids_begin"],
        no_timestamps_token_id=ids[_NO_TIMESTAMPS], is_multilingual=False, return_timestamps=False,
        max_length=model.config.max_target_positions,
    )  # fmt: skip
    extractor = transformers.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
    return model, WhisperProcessor(extractor, tokenizer)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Every variable of the file by its name there; what is float16 becomes float32.

    Raises ValueError for another version of the format than 6.
    """
    with path.open("rb") as file:
        version, _, _, variables = *_read(file, "I"), _name(file), _read(file, "I"), *_read(file, "I")
        if version != _VERSION:
            raise ValueError(f"{path} is of version {version} of CTranslate2's format, and only {_VERSION} is read")
        return dict(_variable(file) for _ in range(variables))


def _variable(file: BinaryIO) -> tuple[str, Tensor]:
    name = _name(file)
    (rank,) = _read(file, "B")
    shape = _read(file, "I" * rank)
    dtype, size = _read(file, "BI")
    tensor = torch.from_numpy(np.frombuffer(bytearray(file.read(size)), _DTYPES[dtype]).reshape(shape))
    return name, tensor.float() if dtype == 4 else tensor


def _name(file: BinaryIO) -> str:
    (length,) = _read(file, "H")
    return file.read(length)[:-1].decode()  # ends in a zero byte


def _read(file: BinaryIO, what: str) -> tuple[int, ...]:
    what = "<" + what
    return struct.unpack(what, file.read(struct.calcsize(what)))


def _config(weights: dict[str, Tensor], ids: dict[str, int]) -> transformers.WhisperConfig:
    vocabulary, width = weights["decoder/embeddings/weight"].shape
    sides = {}
    for side in ("encoder", "decoder"):
        sides[f"{side}_layers"] = len([name for name in weights if name.endswith("ffn/linear_0/bias") and side in name])
        sides[f"{side}_attention_heads"] = int(weights[f"{side}/num_heads"])
        sides[f"{side}_ffn_dim"] = len(weights[f"{side}/layer_0/ffn/linear_0/bias"])
    return transformers.WhisperConfig(
        vocab_size=vocabulary, d_model=width, num_mel_bins=weights["encoder/conv1/weight"].shape[1],
        max_source_positions=len(weights["encoder/position_encodings/encodings"]),
        max_target_positions=len(weights["decoder/position_encodings/encodings"]),
        decoder_start_token_id=ids[_START], bos_token_id=ids[_END], eos_token_id=ids[_END], pad_token_id=ids[_END],
        **sides,
    )  # fmt: skip


def _renamed(weights: dict[str, Tensor], config: transformers.WhisperConfig) -> Iterator[tuple[str, Tensor]]:
    """transformers' names; what CTranslate2 holds as one matrix, queries, keys and values, is divided."""
    yield "proj_out.weight", weights["decoder/embeddings/weight"]
    yield "model.decoder.embed_tokens.weight", weights["decoder/embeddings/weight"]
    for convolution in ("conv1", "conv2"):
        yield from _affine(weights, f"encoder/{convolution}", f"model.encoder.{convolution}")
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        yield f"model.{side}.embed_positions.weight", weights[f"{side}/position_encodings/encodings"]
        yield from _norm(weights, f"{side}/layer_norm", f"model.{side}.layer_norm")
        for layer in range(layers):
            yield from _layer(weights, f"{side}/layer_{layer}/", f"model.{side}.layers.{layer}.")


def _layer(weights: dict[str, Tensor], there: str, here: str) -> Iterator[tuple[str, Tensor]]:
    yield from _norm(weights, f"{there}ffn/layer_norm", f"{here}final_layer_norm")
    for linear in (0, 1):
        yield from _affine(weights, f"{there}ffn/linear_{linear}", f"{here}fc{linear + 1}")
    yield from _norm(weights, f"{there}self_attention/layer_norm", f"{here}self_attn_layer_norm")
    yield from _divided(weights, f"{there}self_attention/linear_0", f"{here}self_attn", "qkv")
    yield from _affine(weights, f"{there}self_attention/linear_1", f"{here}self_attn.out_proj")
    if f"{there}attention/linear_0/bias" in weights:  # a decoder's, on what the encoder heard
        yield from _norm(weights, f"{there}attention/layer_norm", f"{here}encoder_attn_layer_norm")
        yield from _divided(weights, f"{there}attention/linear_0", f"{here}encoder_attn", "q")
        yield from _divided(weights, f"{there}attention/linear_1", f"{here}encoder_attn", "kv")
        yield from _affine(weights, f"{there}attention/linear_2", f"{here}encoder_attn.out_proj")


def _affine(weights: dict[str, Tensor], there: str, here: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{here}.weight", weights[f"{there}/weight"]
    yield f"{here}.bias", weights[f"{there}/bias"]


def _norm(weights: dict[str, Tensor], there: str, here: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{here}.weight", weights[f"{there}/gamma"]
    yield f"{here}.bias", weights[f"{there}/beta"]


def _divided(weights: dict[str, Tensor], there: str, here: str, parts: str) -> Iterator[tuple[str, Tensor]]:
    matrices, biases = (weights[f"{there}/{kind}"].chunk(len(parts)) for kind in ("weight", "bias"))
    for part, matrix, bias in zip(parts, matrices, biases, strict=True):
        yield f"{here}.{part}_proj.weight", matrix
        if part != "k":  # Whisper's keys have none
            yield f"{here}.{part}_proj.bias", bias
