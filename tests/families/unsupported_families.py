"""Families whose activations λ-GELU cannot reach, or not all of them, sorted by what then happens."""

import transformers
from family import tokens
from packaging.version import Version
from text_families import BODY, SPECIAL, TEXT

_EMBEDDED = {**TEXT, "embedding_size": 16}
_GPT2 = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, **SPECIAL}

# name: (prefix, head, sizes, key). A name that the key does not take is an error at construction.
REFUSED = {
    "ibert": ("IBert", "ForMaskedLM", TEXT, "hidden_act"),
    "openai-gpt": ("OpenAIGPT", "LMHeadModel", {**_GPT2}, "afn"),
    "xlm": ("XLM", "ForSequenceClassification", {"vocab_size": 32, "emb_dim": 16, "n_heads": 2}, "gelu_activation"),
}

# name: (prefix, head, sizes, λ-GELU sites that the string makes, activations built anew in one forward).
# What is built anew has the initial hardness at every call: it is never trained, saved or hardened.
BUILT_ANEW = {
    "roformer": ("RoFormer", "ForSequenceClassification", _EMBEDDED, 2, 1),
    "funnel": (
        *("Funnel", "ForPreTraining"),
        {"vocab_size": 32, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "num_decoder_layers": 1},
        *(3, 1),
    ),
}
if Version(transformers.__version__) >= Version("5.15"):  # registers an activation in each layer and calls another
    sizes = {**SPECIAL, "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2}
    BUILT_ANEW["mamba"] = ("Mamba", "ForCausalLM", sizes, 2, 2)

# name: (prefix, head, sizes, key that is ignored, "module class operation" that runs in its place, calls)
IGNORED = {
    "gpt2 with hidden_act": ("GPT2", "LMHeadModel", _GPT2, "hidden_act", "NewGELUActivation tanh", 2),
    "bloom": (
        *("Bloom", "ForCausalLM", {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 2, **SPECIAL}),
        *("hidden_act", "BloomGelu tanh", 2),
    ),
    "gpt-oss": (
        *("GptOss", "ForCausalLM"),
        {
            **BODY,
            **SPECIAL,
            "vocab_size": 32,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "experts_implementation": "eager",  # the other one runs on no CPU with torch 2.8
        },
        *("hidden_act", "GptOssExperts sigmoid", 4),
    ),
}

INPUTS = tokens
