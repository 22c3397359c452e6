"""Tiny models whose λ-GELUs stand alone between two maps, and what their configs say as GELU models."""

from dataclasses import dataclass

import torch
import transformers

from hf_lgelu import LambdaGELU

HIDDEN_ACT = {"hidden_act": "lambda_gelu"}
BODY = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**BODY, "vocab_size": 32, "max_position_embeddings": 32, "pad_token_id": 0}
GPT2 = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONVNEXT_SIZES = {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16]}
SQUARES = {**BODY, "image_size": 32, "patch_size": 8, **HIDDEN_ACT}
TOKENS = {"input_ids": torch.arange(12).reshape(2, 6) * 7 % 29 + 3}
IMAGES = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))}


@dataclass(frozen=True)
class Model:
    """A tiny model of each kind: `changes` are the config's, `sites` the activations."""

    prefix: str
    head: str
    config: dict
    inputs: dict
    changes: dict
    sites: int = 3
    auto: str = ""


def timm(architecture, sizes):
    return {"architecture": architecture, "model_args": {**sizes, "act_layer": "lambda_gelu"}, "num_labels": 3}


CLASSIFIER = "ForSequenceClassification"
IMAGE = "ForImageClassification"
MODELS = {
    "gpt2": Model(
        *("GPT2", "LMHeadModel", {**GPT2, **SPECIAL, "activation_function": "lambda_gelu"}, TOKENS),
        {"activation_function": "gelu"}, 2, "AutoModelForCausalLM",
    ),
    "bert": Model("Bert", CLASSIFIER, TEXT | HIDDEN_ACT, TOKENS, {"hidden_act": "gelu"}),
    "vit": Model("ViT", IMAGE, SQUARES, IMAGES, {"hidden_act": "gelu"}),
    "timm-convnext": Model(
        "TimmWrapper", IMAGE, timm("convnext_tiny", CONVNEXT_SIZES), IMAGES, {"model_args.act_layer": "gelu"}, 4
    ),
}  # fmt: skip


@torch.no_grad()
def build(name):
    """The model with another λ at every site, and weights large enough for a gate's shape to matter."""
    torch.manual_seed(0)
    record = MODELS[name]
    config = getattr(transformers, f"{record.prefix}Config")(**record.config)
    return trained(getattr(transformers, record.prefix + record.head)(config))


@torch.no_grad()
def trained(model):
    for parameter_name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 1.5 / parameter[0].numel() ** 0.5)
        elif not parameter_name.endswith("raw_hardness"):
            parameter.uniform_(0.5, 1.5)
    for index, module in enumerate(m for m in model.modules() if isinstance(m, LambdaGELU)):
        module.hardness_override.fill_((1.5, 3.0, 20.0)[index % 3])
    return model.eval()


@torch.no_grad()
def logits_of(model, inputs):
    return model(**inputs).logits
