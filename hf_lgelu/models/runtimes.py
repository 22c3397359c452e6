"""What other programs do with the activation that a checkpoint's config names.

A converted or hardened checkpoint says ReLU under its family's own config key. A program with its own code for a family
may not read that key, and then computes another network from the same weights, without a word.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_lgelu.models.config_keys import configs_in

HONOURS, REFUSES, IGNORES, UNKNOWN = "honours", "refuses", "ignores", "unknown"
"""What a program does with an activation that is not the family's usual one: computes it, says that it cannot, computes
the usual one all the same, or was not looked into."""


@dataclass(frozen=True)
class Runtime:
    """One program that runs checkpoints or ONNX files.

    Args:
        name: of the program.
        takes: what it is given.
        default: what it does with families that are not named below.
        families: {model_type of transformers: what it does}.
        basis: what was tried with this package, and what was read where.
    """

    name: str
    takes: str
    default: str
    basis: str
    families: Mapping[str, str] = field(default_factory=dict)

    def behaviour(self, model_type: str) -> str:
        """HONOURS, REFUSES, IGNORES or UNKNOWN for a family."""
        return self.families.get(model_type, self.default)


RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        Runtime(
            "transformers", "checkpoint", HONOURS,
            "tried: each exported folder is loaded again and compared; a family without a key for it is refused",
        ),
        Runtime(
            "timm", "checkpoint of transformers' timm wrapper", HONOURS,
            "tried: `model_args.act_layer` of config.json, with a ResNet and a ViT",
        ),
        Runtime(
            "ONNX Runtime", "ONNX file of export_onnx", HONOURS,
            "tried: the file holds the operations themselves, and is compared with torch before it is kept",
        ),
        Runtime(
            "OpenVINO", "ONNX file of export_onnx or quantize_onnx", HONOURS,
            "tried with 2026.4.1: the file holds the operations themselves",
        ),
        Runtime(
            "CTranslate2", "checkpoint", UNKNOWN,
            "read: python/ctranslate2/converters/transformers.py of OpenNMT/CTranslate2, 001b942; the loaders of these "
            "families look the key up in a table that has relu, or set one activation for all",
            {
                **dict.fromkeys(
                    ("gpt2", "bert", "distilbert", "bart", "mbart", "marian", "m2m_100", "pegasus", "opt", "gptj"),
                    HONOURS,
                ),
                **dict.fromkeys(("gpt_bigcode", "gpt_neox", "codegen"), HONOURS),
                **dict.fromkeys(("llama", "falcon", "mpt"), IGNORES),
            },
        ),
        Runtime(
            "llama.cpp", "GGUF file of convert_hf_to_gguf.py", UNKNOWN,
            "read: src/models/gpt2.cpp, bert.cpp and llama.cpp of ggml-org/llama.cpp, 82234e0, 0820f21 and 069be0a, "
            "name GELU or SiLU whatever the config says (for falcon, Tiiny-AI/PowerInfer#189); modern-bert reads the "
            "key (ggml-org/llama.cpp#26751)",
            {**dict.fromkeys(("gpt2", "bert", "llama", "falcon"), IGNORES), "modernbert": HONOURS},
        ),
        Runtime(
            "vLLM", "checkpoint", UNKNOWN,
            "read: vllm/model_executor/models/gpt2.py, bert.py and llama.py of vllm-project/vllm, 0176894, 002b4cf and "
            '0035bdf; model_impl="transformers" runs transformers\' own code, which honours the key',
            {"gpt2": HONOURS, "bert": HONOURS, "llama": REFUSES},
        ),
    )
}  # fmt: skip
"""By name. A new row is a `Runtime`, with what was tried or read; docs/export.md shows the table."""


def runtime_warnings(config: Any) -> tuple[str, ...]:
    """What a user of a checkpoint with another activation than its family's must know, a sentence for each program.

    Args:
        config: of a transformers model. What has no family, such as None or a timm model's config, gives no warning.

    Raises TypeError for a model or a folder in its place.

    Example:
        >>> from transformers import GPT2Config
        >>> from hf_lgelu import runtime_warnings
        >>> runtime_warnings(GPT2Config())
        ('llama.cpp ignores the activation that the config of a gpt2 names, and computes another network',)
    """
    if isinstance(config, str | os.PathLike | nn.Module):
        raise TypeError(
            f"config must be the config of a transformers model, such as model.config, got {type(config).__name__}"
        )
    configs = configs_in(config) if isinstance(config, PreTrainedConfig) else [config]  # of its parts as well
    model_types = dict.fromkeys(filter(None, (getattr(each, "model_type", "") for each in configs)))
    sentences = {
        IGNORES: "ignores the activation that the config of a {} names, and computes another network",
        REFUSES: "refuses the config of a {} that names another activation than the family's own",
    }
    return tuple(
        f"{runtime.name} {sentences[runtime.behaviour(model_type)].format(model_type)}"
        for model_type in model_types
        for runtime in RUNTIMES.values()
        if runtime.behaviour(model_type) in sentences
    )


def runtime_table() -> str:
    """RUNTIMES in Markdown, as docs/export.md shows it."""
    lines = ["| program | takes | an activation that is not the family's own | known from |", "|---|---|---|---|"]
    for runtime in RUNTIMES.values():
        known = [
            f"{behaviour}: {', '.join(names)}"
            for behaviour in (HONOURS, REFUSES, IGNORES)
            if (names := sorted(name for name, found in runtime.families.items() if found == behaviour))
        ]
        answer = "; ".join([*known, f"other families: {runtime.default}"] if known else [runtime.default])
        lines.append(f"| {runtime.name} | {runtime.takes} | {answer} | {runtime.basis} |")
    return "\n".join(lines)
