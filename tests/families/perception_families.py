"""Models of images, sound and time series, and timm models in transformers' wrapper.

Two layers with one MLP each, so two sites, unless a comment says more.
"""

from typing import Any

import torch
from family import Family, decoder_tokens, large_pixels, normal, pixels, pixels_and_tokens
from text_families import ACTIVATION_FUNCTION, BODY, DECODED, HIDDEN_ACT, SPECIAL, TEXT

_TOWER = {**BODY, "image_size": 16, "patch_size": 8}
_IMAGE = {**_TOWER, "num_labels": 3}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
_CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "num_labels": 3}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
_REGNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8, "num_labels": 3}
_FOCALNET = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "focal_levels": [1, 1]}
_CVT = {
    **{"embed_dim": [8, 16], "num_heads": [1, 2], "depth": [1, 2], "patch_sizes": [7, 3], "patch_stride": [4, 2]},
    **{"patch_padding": [2, 1], "mlp_ratio": [2.0, 2.0], "cls_token": [False, True], "num_labels": 3},
}
_WORDS = {**TEXT, "projection_dim": 16, "projection_size": 16}
_TWO_TOWERS = {"text_config": _WORDS, "vision_config": _TOWER, "projection_dim": 16}
_TOWER_KEYS = {"text_config.hidden_act": "{}", "vision_config.hidden_act": "{}"}
_LLAVA = {
    "text_config": {**TEXT, "num_key_value_heads": 1, "model_type": "llama"},
    "vision_config": {**_TOWER, "model_type": "clip_vision_model"},
    **{"image_token_index": 31, "vision_feature_layer": -1},
}
_LLAVA_KEYS = {**_TOWER_KEYS, "projector_hidden_act": "{}"}
_WHISPER = {**DECODED, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16}
_WAV2VEC2 = {
    **{"vocab_size": 32, "conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, **BODY, **SPECIAL},
}
_WAV2VEC2_KEYS = {"hidden_act": "{}", "feat_extract_activation": "{}"}
_PATCHTST = {
    **{"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "prediction_length": 4},
}

_ACT_LAYER = {"model_args.act_layer": "{}"}
_TIMM_VIT = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3}
_TIMM_SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}
_TIMM_RESNET = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]}


def _timm(architecture: str, model_args: dict[str, Any]) -> dict[str, Any]:
    return {"architecture": architecture, "model_args": model_args, "num_labels": 3}


def _image_prompts() -> dict[str, torch.Tensor]:
    # four patches an image, each in the place of one token
    return {**pixels(), "input_ids": torch.tensor([[1, 31, 31, 31, 31, 9, 4], [1, 31, 31, 31, 31, 5, 11]])}


def _spectrogram() -> dict[str, torch.Tensor]:
    return {"input_features": normal(2, 8, 20), **decoder_tokens()}


def _sound() -> dict[str, torch.Tensor]:
    return {"input_values": normal(2, 200)}


def _series() -> dict[str, torch.Tensor]:
    return {"past_values": normal(2, 16, 2)}


IMAGE = "ForImageClassification"

PERCEPTION_FAMILIES: tuple[Family, ...] = (
    Family("vit", "ViT", IMAGE, _IMAGE, HIDDEN_ACT, pixels, 2),
    Family("deit", "DeiT", IMAGE, _IMAGE, HIDDEN_ACT, pixels, 2),
    Family("beit", "Beit", IMAGE, _IMAGE, HIDDEN_ACT, pixels, 2),
    # two stages of one block
    Family("swin", "Swin", IMAGE, _SWIN, HIDDEN_ACT, pixels, 2),
    # stages of one and two blocks
    Family("convnext", "ConvNext", IMAGE, _CONVNEXT, HIDDEN_ACT, pixels, 3),
    Family("dinov2", "Dinov2", IMAGE, _IMAGE, HIDDEN_ACT, pixels, 2),
    # the stem's and one behind the sum of each of two blocks; those inside a block are fixed ReLUs
    Family("resnet", "ResNet", IMAGE, _RESNET, HIDDEN_ACT, pixels, 3),
    # the stem's, and in each of two Y layers one behind each of two convolutions and one behind the sum;
    # squeeze-and-excitation has a fixed ReLU and a sigmoid
    Family("regnet", "RegNet", IMAGE, _REGNET, HIDDEN_ACT, pixels, 7, {"Sigmoid sigmoid": 2}),
    # GELU whatever the config says; stages of one and two blocks
    Family("cvt", "Cvt", IMAGE, _CVT, {}, large_pixels, 3),
    # the MLPs read the config; focal modulation has a GELU per level and one behind them, whatever it says:
    # two stages of one block with one level, three each
    Family("focalnet", "FocalNet", IMAGE, _FOCALNET, {}, pixels, 6),
    # a text and an image tower of two layers each
    Family("clip", "CLIP", "Model", _TWO_TOWERS, _TOWER_KEYS, pixels_and_tokens, 4),
    # + the image tower's attention pooling head
    Family("siglip", "Siglip", "Model", _TWO_TOWERS, _TOWER_KEYS, pixels_and_tokens, 5),
    # two layers of the image tower, two of the language model, one in the projector between them
    Family("llava", "Llava", "ForConditionalGeneration", _LLAVA, _LLAVA_KEYS, _image_prompts, 5),
    # two layers each in encoder and decoder; the encoder's two convolutions call F.gelu
    Family(
        *("whisper", "Whisper", "ForConditionalGeneration", _WHISPER, ACTIVATION_FUNCTION, _spectrogram),
        sites=4,
        smooth={"WhisperEncoder gelu": 2},
    ),
    # two layers; two convolutions of the feature extractor and the positional convolution have the other key
    Family("wav2vec2", "Wav2Vec2", "ForCTC", _WAV2VEC2, _WAV2VEC2_KEYS, _sound, 5),
    # reads transformers' ACT2CLS, not ACT2FN
    Family("patchtst", "PatchTST", "ForPrediction", _PATCHTST, ACTIVATION_FUNCTION, _series, 2),
    # the counts are explained in timm_families.py
    Family("timm-wrapper-resnet18", "TimmWrapper", IMAGE, _timm("resnet18", _TIMM_RESNET), _ACT_LAYER, large_pixels, 9),
    Family(
        *("timm-wrapper-vit", "TimmWrapper", IMAGE, _timm("vit_tiny_patch16_224", _TIMM_VIT)),
        *(_ACT_LAYER, large_pixels, 2),
    ),
    # no act_layer argument
    Family(
        *("timm-wrapper-swin", "TimmWrapper", IMAGE, _timm("swin_tiny_patch4_window7_224", _TIMM_SWIN)),
        *({}, large_pixels, 2),
    ),
)
