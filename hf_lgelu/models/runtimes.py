"""Programs that are known not to compute the activation that a checkpoint's config names.

A converted or hardened checkpoint says ReLU under its family's own config key. A program with its own code for a family
may not read that key, and then computes another network from the same weights, without a word. docs/deploy.md says what
was tried and read, also of programs that honour the key.
"""

import os
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_lgelu.models.config_keys import configs_in

IGNORES = "ignores the activation that the config of a {} names, and computes another network"
REFUSES = "refuses the config of a {} that names another activation than the family's own"

RUNTIMES: dict[str, dict[str, str]] = {
    # python/ctranslate2/converters/transformers.py of OpenNMT/CTranslate2, 001b942
    "CTranslate2": dict.fromkeys(("llama", "falcon", "mpt"), IGNORES),
    # src/models/gpt2.cpp, bert.cpp and llama.cpp of ggml-org/llama.cpp, 82234e0, 0820f21 and 069be0a, name GELU or SiLU
    # whatever the config says (falcon: Tiiny-AI/PowerInfer#189)
    "llama.cpp": dict.fromkeys(("gpt2", "bert", "llama", "falcon"), IGNORES),
    # vllm/model_executor/models/llama.py of vllm-project/vllm, 0035bdf
    "vLLM": {"llama": REFUSES},
}
"""{program: {model_type of transformers: IGNORES or REFUSES}}; a family that is not named is honoured, or unknown."""


def runtime_warnings(config: Any) -> tuple[str, ...]:
    """What a user of a checkpoint with another activation than its family's must know, a sentence for each program.

    Args:
        config: of a transformers model. What has no family, such as None or a timm model's config, gives no warning.

    Raises TypeError for a model or a folder in its place.

    Example:
        >>> from transformers import GPT2Config
        >>> from hf_lgelu.models.runtimes import runtime_warnings
        >>> runtime_warnings(GPT2Config())
        ('llama.cpp ignores the activation that the config of a gpt2 names, and computes another network',)
    """
    if isinstance(config, str | os.PathLike | nn.Module):
        raise TypeError(
            f"config must be the config of a transformers model, such as model.config, got {type(config).__name__}"
        )
    configs = configs_in(config) if isinstance(config, PreTrainedConfig) else [config]  # of its parts as well
    model_types = dict.fromkeys(getattr(each, "model_type", "") for each in configs)
    return tuple(
        f"{program} {families[model_type].format(model_type)}"
        for model_type in model_types
        for program, families in RUNTIMES.items()
        if model_type in families
    )
