"""Language models. Two layers with one MLP each, so two sites, unless a comment says more."""

from family import Family, tokens, tokens_with_decoder

HIDDEN_ACT = {"hidden_act": "{}"}
ACTIVATION_FUNCTION = {"activation_function": "{}"}

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BODY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**BODY, **SPECIAL, "vocab_size": 32, "max_position_embeddings": 32}
DECODED = {
    **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 32, "decoder_start_token_id": 2},
    **SPECIAL,
    "forced_eos_token_id": None,
}
_SMALL_EMBEDDING = {**TEXT, "embedding_size": 8}
_CAUSAL = {**TEXT, "num_key_value_heads": 1}
_GEMMA = {**_CAUSAL, "head_dim": 8}
_GPT = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
_DISTIL = {"vocab_size": 32, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 32}
_XLNET = {"vocab_size": 32, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, **SPECIAL}
_T5 = {
    **{"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    **{"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}
_MODERNBERT = {**TEXT, "cls_token_id": 1, "sep_token_id": 2}
_MODERNBERT_KEYS = {"hidden_activation": "{}", "classifier_activation": "{}"}
_OPT = {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}
_FALCON = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, **SPECIAL}
_MPT = {"vocab_size": 32, "d_model": 16, "n_heads": 2, "n_layers": 2}
_XLM = {"vocab_size": 32, "emb_dim": 16, "n_layers": 2, "n_heads": 2}

_TANH = {"Tanh tanh": 1}
_GELU = {"GELUActivation gelu": 1}
# the attention scores of each layer and the logits are capped
_GEMMA2_CAPS = {"Gemma2Attention tanh": 2, "Gemma2ForCausalLM tanh": 1}

TEXT_FAMILIES: tuple[Family, ...] = (
    Family("gpt2", "GPT2", "LMHeadModel", {**_GPT, **SPECIAL}, ACTIVATION_FUNCTION, tokens, 2),
    # + the transform in the masked language modelling head
    Family("bert", "Bert", "ForMaskedLM", TEXT, HIDDEN_ACT, tokens, 3),
    # the pooler is a tanh
    Family("bert-classification", "Bert", "ForSequenceClassification", TEXT, HIDDEN_ACT, tokens, 2, _TANH),
    # the head calls transformers' module-level GELU, which no key reaches
    Family("roberta", "Roberta", "ForMaskedLM", TEXT, HIDDEN_ACT, tokens, 2, _GELU),
    # + the transform in the masked language modelling head
    Family("distilbert", "DistilBert", "ForMaskedLM", _DISTIL, {"activation": "{}"}, tokens, 3),
    # one layer's weights serve all layers: one site, called twice; the pooler is a tanh
    Family("albert", "Albert", "ForSequenceClassification", _SMALL_EMBEDDING, HIDDEN_ACT, tokens, 1, _TANH),
    # + the discriminator head's
    Family("electra", "Electra", "ForPreTraining", _SMALL_EMBEDDING, HIDDEN_ACT, tokens, 3),
    # the pooler builds a GELU at every call, from pooler_hidden_act
    Family("deberta-v2", "DebertaV2", "ForSequenceClassification", TEXT, HIDDEN_ACT, tokens, 2, _GELU),
    # + the prediction head's
    Family("modernbert", "ModernBert", "ForMaskedLM", _MODERNBERT, _MODERNBERT_KEYS, tokens, 3),
    # the sequence summary is a tanh
    Family("xlnet", "XLNet", "ForSequenceClassification", _XLNET, {"ff_activation": "{}"}, tokens, 2, _TANH),
    # two layers each in encoder and decoder
    Family("t5", "T5", "ForConditionalGeneration", _T5, {"feed_forward_proj": "{}"}, tokens_with_decoder, 4),
    Family(
        "t5-gated",
        "T5",
        "ForConditionalGeneration",
        _T5,
        {"feed_forward_proj": "gated-{}"},
        tokens_with_decoder,
        4,
        gate="lambda_gelu_tanh",
    ),
    Family("bart", "Bart", "ForConditionalGeneration", DECODED, ACTIVATION_FUNCTION, tokens_with_decoder, 4),
    Family("gemma", "Gemma", "ForCausalLM", _GEMMA, HIDDEN_ACT, tokens, 2, gate="lambda_gelu_tanh"),
    Family("gemma2", "Gemma2", "ForCausalLM", _GEMMA, {"hidden_activation": "{}"}, tokens, 2, _GEMMA2_CAPS),
    Family("llama", "Llama", "ForCausalLM", _CAUSAL, HIDDEN_ACT, tokens, 2),
    Family("mistral", "Mistral", "ForCausalLM", _CAUSAL, HIDDEN_ACT, tokens, 2),
    Family("qwen2", "Qwen2", "ForCausalLM", _CAUSAL, HIDDEN_ACT, tokens, 2),
    # one activation for all experts of a layer
    Family("mixtral", "Mixtral", "ForCausalLM", {**_CAUSAL, "num_local_experts": 2}, HIDDEN_ACT, tokens, 2),
    Family("gpt-neox", "GPTNeoX", "ForCausalLM", TEXT, HIDDEN_ACT, tokens, 2),
    Family("opt", "OPT", "ForCausalLM", _OPT, ACTIVATION_FUNCTION, tokens, 2),
    Family("phi", "Phi", "ForCausalLM", TEXT, HIDDEN_ACT, tokens, 2),
    Family("falcon", "Falcon", "ForCausalLM", _FALCON, {"activation": "{}"}, tokens, 2),
    # GELU whatever the config says
    Family("mpt", "Mpt", "ForCausalLM", _MPT, {}, tokens, 2),
    # a boolean key: GELU or else ReLU
    Family("xlm", "XLM", "ForSequenceClassification", _XLM, {}, tokens, 2, relu_keys={"gelu_activation": False}),
    # the key reads a table of the family's own
    Family("openai-gpt", "OpenAIGPT", "LMHeadModel", _GPT, {}, tokens, 2, relu_keys={"afn": "relu"}),
)
