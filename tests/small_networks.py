"""Small seeded networks that tests share, one row a network: how it is built, and inputs for it.

Weights are float64 and drawn large enough that the gates matter, so that numbers agree to many digits on any processor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_lgelu import ConversionConfig, convert_to_relu, replace_activations
from hf_lgelu.networks.sites import SELF_GATE_KINDS, find_sites
from hf_lgelu.refit.convert import Conversion

VOCABULARY = 40
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"intermediate_size": 24, "max_position_embeddings": 16, "pad_token_id": 0}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, delta):
        raise NotImplementedError


class MemorySwish(nn.Module):
    """x·σ(x) as an autograd.Function, which keeps its input alone."""

    def forward(self, x):
        return _Swish.apply(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 10), nn.SiLU(), nn.Linear(10, 4))


def gpt2(**more: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | more))


def llama(**more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT | {"num_key_value_heads": 1} | more))


def bert(**more: Any) -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT | {"num_labels": 3} | more))


def t5(**more: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    tokens = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.T5Config(**sizes | tokens | {"feed_forward_proj": "gated-gelu"} | more)
    return transformers.T5ForConditionalGeneration(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=6, hidden_sizes=[6, 10], depths=[1, 1], layer_type="basic", hidden_act="gelu", num_labels=3
    )
    return transformers.ResNetForImageClassification(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=3,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def sound() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 6, 5, stride=2), nn.GELU(), nn.Conv1d(6, 8, 3, stride=2), nn.GELU(), nn.Flatten(),
        nn.Linear(8 * 6, 3),
    )  # fmt: skip


def rows_of(*shape: int) -> Callable[[int, int], Tensor]:
    """Standard normal rows of a shape."""
    return lambda count, seed: torch.randn(count, *shape, generator=_generator(seed), dtype=torch.float64)


def images(count: int, seed: int) -> dict[str, Tensor]:
    return {"pixel_values": rows_of(3, 8, 8)(count, seed)}


def tokens(count: int, seed: int, *, padding: str | None = None) -> dict[str, Tensor]:
    """Texts of 4 to 10 tokens, padded on the side that `padding` names, or of 10 tokens each."""
    ids = torch.randint(3, VOCABULARY, (count, 10), generator=_generator(seed))
    if padding is None:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    lengths = torch.randint(4, 11, (count, 1), generator=_generator(seed + 1))
    places = torch.arange(10)
    mask = (places < lengths) if padding == "right" else (places >= 10 - lengths)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def tokens_and_labels(count: int, seed: int) -> dict[str, Tensor]:
    found = tokens(count, seed, padding="right")
    return {**found, "labels": tokens(count, seed + 7)["input_ids"][:, :6]}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Calls(nn.Module):
    """Runs a function of its input."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@dataclass(frozen=True)
class Network:
    """A row of `NETWORKS`: a smooth network and `count` inputs for it."""

    build: Callable[[], nn.Module]
    draw: Callable[[int, int], Any]
    count: int = 96

    def model(self, seed: int = 0) -> nn.Module:
        """In evaluation mode, with weights twice as large as they are initialized."""
        torch.manual_seed(seed)
        model = self.build().double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 2 / parameter[0].numel() ** 0.5)
        return model

    def inputs(self, count: int | None = None, seed: int = 5) -> Any:
        return self.draw(count or self.count, seed)


NETWORKS: dict[str, Network] = {
    "mlp": Network(mlp, rows_of(6)),
    "gpt2": Network(gpt2, tokens),
    "llama": Network(llama, tokens),
    "bert padded right": Network(bert, lambda count, seed: tokens(count, seed, padding="right")),
    "bert padded left": Network(bert, lambda count, seed: tokens(count, seed, padding="left")),
    "t5": Network(t5, tokens_and_labels),
    "resnet": Network(resnet, images),
    "vit": Network(vit, images),
    "sound": Network(sound, rows_of(1, 29)),
}


def convert_with(model: nn.Module, data: Any, *, evaluation_data: Any = None, **options: Any) -> Conversion:
    """`convert_to_relu` with any fields of `ConversionConfig`."""
    return convert_to_relu(model, data, evaluation_data=evaluation_data, options=ConversionConfig(**options))


def put_gates_of_two_forms(model, **options):
    """λ-SiLU at the first site and λ-GELU at all others, which no activation key says; or at the sites of `include`."""
    first, *others = [site.name for site in find_sites(model, SELF_GATE_KINDS)]
    replace_activations(model, gate="lambda_silu", **{"include": first.__eq__} | options)
    if others and "include" not in options:
        replace_activations(model, gate="lambda_gelu", **options)
