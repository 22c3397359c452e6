"""Families that are only converted: the tests of λ-GELU do not run them.

Two layers with one MLP each, so two gates, unless a comment says more. `keys` is empty: the gate is the family's own.
"""

from functools import partial
from typing import Any

import torch
from family import Family, decoder_tokens, large_pixels, normal, pixels, tokens
from text_families import BODY, SPECIAL, TEXT

_CAUSAL = {**TEXT, "num_key_value_heads": 1}
_EXPERTS = {**_CAUSAL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
_IMAGE = {**BODY, "image_size": 16, "patch_size": 8, "num_labels": 3}
_SOUND = {
    **{"vocab_size": 32, "conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, **BODY, **SPECIAL},
}
_STATES = {**SPECIAL, "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
_MAMBA2 = {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
_SSM = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_GRANITE = {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 24}
_JAMBA = {
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    **{"use_mamba_kernels": False},
}
_DELTA = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_DENSE = {"head_dim": 8, "num_experts": 0, "mlp_only_layers": [0, 1]}
_NEMOTRON = {
    **{"layers_block_type": ["mamba", "mlp", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1},
    **{"ssm_state_size": 4, "head_dim": 8, "chunk_size": 8},
}
_ZAMBA = {
    **{"layers_block_type": ["mamba", "hybrid"], "mamba_headdim": 8, "n_mamba_heads": 4, "mamba_ngroups": 1},
    **{"mamba_d_state": 4, "chunk_size": 8, "num_mem_blocks": 1, "attention_head_dim": 16, "adapter_rank": 4},
}
_SERIES = {
    **{"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16},
    **{"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2},
}
_CODEC = {"num_filters": 4, "upsampling_ratios": [4, 2], "hidden_size": 8, "codebook_size": 16, "codebook_dim": 8}
_EOMT = {"image_size": 32, "mlp_ratio": 2, "num_upscale_blocks": 1, "num_blocks": 1, "num_queries": 5}
_LEVIT = {
    **{"num_channels": 3, "image_size": 32, "hidden_sizes": [8] * 3, "num_attention_heads": [1] * 3, "num_labels": 3},
    **{"depths": [1] * 3, "key_dim": [4] * 3, "mlp_ratio": [2] * 3, "attention_ratio": [2] * 3},
}
_MGP = {
    **{"image_size": [16, 16], "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"max_token_length": 4, "num_character_labels": 9, "num_bpe_labels": 5, "num_wordpiece_labels": 5},
}
_MOONSHINE = {
    **{"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 2},
    **{"decoder_num_attention_heads": 2, "decoder_start_token_id": 1},
}
_MLLAMA = {
    "text_config": {**_CAUSAL, "num_hidden_layers": 3, "cross_attention_layers": [1]},
    "vision_config": {
        **{**BODY, "num_global_layers": 1, "attention_heads": 2, "image_size": 16, "patch_size": 8},
        **{"max_num_tiles": 2, "intermediate_layers_indices": [1], "vision_output_dim": 32},
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    },
    "image_token_index": 31,
}
_DBRX = {
    **{"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64, "vocab_size": 32},
    "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
}
_LONGCAT = {
    **{**TEXT, "num_layers": 2, "ffn_hidden_size": 24, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8},
    **{"qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4, "moe_topk": 2, "n_routed_experts": 4},
    **{"zero_expert_num": 2, "expert_ffn_hidden_size": 12},
}
_BARK = {
    **{"block_size": 32, "input_vocab_size": 32, "output_vocab_size": 32, "num_layers": 2, "num_heads": 2},
    "hidden_size": 16,
}
_TIMESFM = {
    **{"patch_length": 4, "context_length": 16, "horizon_length": 4, "num_hidden_layers": 2, "hidden_size": 16},
    **{"intermediate_size": 24, "head_dim": 8, "num_attention_heads": 2},
}


def _tiles() -> dict[str, torch.Tensor]:
    return {
        **{
            **tokens(),
            "attention_mask": torch.ones(2, 6, dtype=torch.long),
            "pixel_values": normal(2, 1, 2, 3, 16, 16),
        },
        **{"aspect_ratio_ids": torch.full((2, 1), 2), "aspect_ratio_mask": torch.ones(2, 1, 2, dtype=torch.long)},
        "cross_attention_mask": torch.ones(2, 6, 1, 2, dtype=torch.long),
    }


def _spoken() -> dict[str, torch.Tensor]:
    return {"input_values": normal(2, 1500), **decoder_tokens()}


def _past() -> dict[str, torch.Tensor]:
    return {"past_values": normal(2, 16), "freq": torch.zeros(2, 1, dtype=torch.long)}


def _series() -> dict[str, torch.Tensor]:
    return {
        **{
            "past_values": normal(2, 10),
            "past_time_features": normal(2, 10, 1),
            "past_observed_mask": torch.ones(2, 10),
        },
        **{"future_values": normal(2, 4), "future_time_features": normal(2, 4, 1)},
    }


def _sound(*shape: int) -> dict[str, torch.Tensor]:
    return {"input_values": normal(2, *shape)}


def _patches() -> dict[str, torch.Tensor]:
    return {"past_values": normal(2, 16, 2)}


def _row(name: str, prefix: str, head: str, sizes: dict[str, Any], inputs: Any, gates: int) -> Family:
    return Family(name, prefix, head, sizes, {}, inputs, gates)


_text = partial(_row, inputs=tokens, gates=2)
_image = partial(_row, head="ForImageClassification", inputs=pixels, gates=2)

FURTHER_FAMILIES: tuple[Family, ...] = (
    # texts
    _text("starcoder2", "Starcoder2", "ForCausalLM", _CAUSAL),
    _text("phi3", "Phi3", "ForCausalLM", _CAUSAL),
    # + the transform of the head
    _text("longformer", "Longformer", "ForMaskedLM", {**TEXT, "attention_window": 4}, gates=3),
    # state space: in a layer a module that nothing calls, the convolution, the scan or a norm, and what stands for
    # these where tokens are generated one by one
    _text("mamba", "Mamba", "ForCausalLM", _STATES, gates=10),
    _text("falcon-mamba", "FalconMamba", "ForCausalLM", _STATES, gates=10),
    _text("mamba2", "Mamba2", "ForCausalLM", _STATES | _MAMBA2, gates=8),
    # one layer of these and one of attention, with an MLP each
    _text("jamba", "Jamba", "ForCausalLM", _CAUSAL | _JAMBA, gates=7),
    _text("bamba", "Bamba", "ForCausalLM", _CAUSAL | _SSM | {"attn_layer_indices": [1]}, gates=6),
    _text("granitemoehybrid", "GraniteMoeHybrid", "ForCausalLM", _CAUSAL | _SSM | _GRANITE, gates=6),
    _text("qwen3-next", "Qwen3Next", "ForCausalLM", _CAUSAL | _DELTA | _DENSE, gates=5),
    _text("olmo-hybrid", "OlmoHybrid", "ForCausalLM", _CAUSAL | _DELTA, gates=5),
    # no MLP, or one with squared ReLU
    _text("nemotron-h", "NemotronH", "ForCausalLM", _CAUSAL | _NEMOTRON, gates=4),
    # both in each layer
    _text("falcon-h1", "FalconH1", "ForCausalLM", _CAUSAL | _SSM | {"head_dim": 8, "mamba_d_ssm": 32}, gates=12),
    # two of state space, one MLP
    _text("zamba2", "Zamba2", "ForCausalLM", TEXT | _ZAMBA, gates=9),
    # experts
    _text("qwen3-moe", "Qwen3Moe", "ForCausalLM", _EXPERTS),
    _text("dbrx", "Dbrx", "ForCausalLM", _DBRX),
    # an MLP in each of two halves of a layer
    _text("longcat-flash", "LongcatFlash", "ForCausalLM", _LONGCAT, gates=3),
    # images
    _image(
        "poolformer",
        "PoolFormer",
        sizes={"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4},
        inputs=large_pixels,
        gates=4,
    ),
    # a backbone gives nothing but maps
    _row("dinov2-backbone", "Dinov2", "Backbone", {**_IMAGE, "out_features": ["stage1", "stage2"]}, pixels, 2),
    # detection: one in each layer; the heads of classes and boxes have ReLU
    _row("yolos", "Yolos", "ForObjectDetection", {**_IMAGE, "image_size": [16, 16]}, pixels, 2),
    # segmentation: + one in each of two upsamplings
    _row("eomt", "Eomt", "ForUniversalSegmentation", {**_IMAGE, **_EOMT}, large_pixels, 4),
    _text("bloom", "Bloom", "ForCausalLM", {**SPECIAL, "vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    # three in front; three stages of attention and MLP, and both again between two stages
    _image("levit", "Levit", sizes=_LEVIT, inputs=large_pixels, gates=13),
    _row("mgp-str", "Mgpstr", "ForSceneTextRecognition", _MGP, pixels, 2),
    # images and texts: two layers, one of both, three of text
    _row("mllama", "Mllama", "ForConditionalGeneration", _MLLAMA, _tiles, 6),
    # speech: + one in each of two convolutions and the positional convolution
    _row("hubert", "Hubert", "ForCTC", _SOUND, partial(_sound, 200), 5),
    # + one behind the upsampling
    _row("sew", "SEW", "ForCTC", {**_SOUND, "squeeze_factor": 2}, partial(_sound, 200), 6),
    # + two convolutions in front
    _row("moonshine", "Moonshine", "ForConditionalGeneration", {**TEXT, **_MOONSHINE}, _spoken, 6),
    _row("bark", "BarkSemantic", "Model", _BARK, tokens, 2),
    # time series: in front and behind
    _row("timesfm", "TimesFm", "ModelForPrediction", _TIMESFM, _past, 2),
    # one layer each in encoder and decoder
    _row("time-series-transformer", "TimeSeriesTransformer", "ForPrediction", _SERIES, _series, 2),
    _row(
        *("patchtsmixer", "PatchTSMixer", "ForPrediction"),
        {
            **{"context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 8, "num_layers": 2},
            **{"num_input_channels": 2, "prediction_length": 4},
        },
        *(_patches, 4),
    ),
    # a codec: in each of two towers two stages of a residual block with two ELUs and one behind it, and one at the end
    _row("encodec", "Encodec", "Model", _CODEC, partial(_sound, 1, 64), 14),
)
