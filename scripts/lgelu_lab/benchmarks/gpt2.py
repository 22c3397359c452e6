"""GPT-2 (Radford et al., 2019), from scratch or from a checkpoint."""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel
from transformers.activations import ACT2FN
from transformers.utils import logging

from hf_lgelu.cli.inputs.token_blocks import IGNORED, TokenBlocks
from hf_lgelu.models.profile import initialize_hardness
from hf_lgelu.models.registry import ACTIVATION_NAME
from hf_lgelu.models.sites import find_sites
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.benchmarks.metrics import token_losses
from lgelu_lab.benchmarks.options import ModelOptions
from lgelu_lab.benchmarks.tokenizer import unreachable

logger = logging.get_logger(__name__)

DROPOUT = 0.0
"""From scratch. With GPT-2's own 0.1, perplexity on WikiText-2's validation split was 5 % higher after each of the
first 4 epochs (of 6), and two processes would draw other numbers than one."""
_COMPARED_BLOCKS = 8


def build_gpt2(activation: str, data: BenchmarkData, options: ModelOptions) -> GPT2LMHeadModel:
    """A GPT-2 for these blocks: freshly initialized, or `options.pretrained` with its activation exchanged.

    From scratch it has `num_layers`, `width` and `num_heads` of the options, all of which must be set. Of a
    checkpoint only as many positions are kept as a block has, and a warning says by how much the exchange of the
    activation moves its loss on the first blocks of `data.eval`: GPT-2's own is the tanh form of GELU, and
    λ-GELU at λ = 1 is the erf form.

    Raises ValueError for a width that the heads do not divide, or a checkpoint that is no GPT-2, has fewer
    positions than a block or another vocabulary than the tokenizer; RuntimeError for one that cannot be loaded.
    """
    context_length = data.train.tokens.shape[1]
    if options.pretrained is not None:
        return _fine_tuned(activation, data, options.pretrained, context_length)
    if options.width % options.num_heads:
        raise ValueError(f"num_heads must divide width, got {options.num_heads} heads of a width of {options.width}")
    end_of_text = data.processor.eos_token_id
    config = GPT2Config(
        n_layer=options.num_layers,
        n_embd=options.width,
        n_head=options.num_heads,
        n_positions=context_length,
        vocab_size=len(data.processor),
        activation_function=activation,
        resid_pdrop=DROPOUT,
        embd_pdrop=DROPOUT,
        attn_pdrop=DROPOUT,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
    )
    return GPT2LMHeadModel(config)


def losses_after_exchange(
    model: GPT2LMHeadModel,
    blocks: TokenBlocks,
    activations: Sequence[str] = ("gelu", ACTIVATION_NAME),
    *,
    init_hardness: float = 1.0067,
    batch_size: int = 8,
) -> dict[str, float]:
    """By how much the loss moves when the activation is exchanged and every weight stays.

    Args:
        model: is left as it is.
        blocks: what the loss is taken on.
        activations: names of transformers, e.g. "gelu", the erf form.
        init_hardness: λ of "lambda_gelu" at every site.
        batch_size: blocks in one forward pass.

    Returns:
        {activation: mean negative log-likelihood of a predicted token, in nats}, the model's own first.
    """
    losses = {model.config.activation_function: _mean_loss(model, blocks, batch_size)}
    for activation in activations:
        exchanged = copy.deepcopy(model)
        for site in find_sites(exchanged):
            site.put(ACT2FN[activation])
        if activation == ACTIVATION_NAME:
            initialize_hardness(exchanged, init_hardness=init_hardness)
        losses[activation] = _mean_loss(exchanged, blocks, batch_size)
    return losses


def _fine_tuned(activation: str, data: BenchmarkData, pretrained: str, context_length: int) -> GPT2LMHeadModel:
    try:
        config = AutoConfig.from_pretrained(pretrained)
    except (OSError, ValueError) as error:
        raise unreachable("config", pretrained, error) from error
    if config.model_type != "gpt2":
        raise ValueError(f"pretrained must be a GPT-2, and {pretrained!r} is a {config.model_type}")
    if config.n_positions < context_length:
        raise ValueError(
            f"{pretrained!r} has {config.n_positions} positions, fewer than context_length {context_length}; "
            "give a shorter one"
        )
    if config.vocab_size < len(data.processor):
        raise ValueError(
            f"{pretrained!r} has {config.vocab_size} token embeddings, and its tokenizer {len(data.processor)} tokens"
        )
    try:
        model = GPT2LMHeadModel.from_pretrained(pretrained, activation_function=activation, use_safetensors=True)
        if config.activation_function != activation:
            original = GPT2LMHeadModel.from_pretrained(pretrained, use_safetensors=True)
    except OSError as error:
        raise unreachable("weights", pretrained, error) from error
    if config.activation_function != activation:
        _tell_exchange(original, model, data.eval)
    _cut_positions(model, context_length)
    return model


def _tell_exchange(original: GPT2LMHeadModel, exchanged: GPT2LMHeadModel, blocks: TokenBlocks) -> None:
    compared = blocks.take(range(min(_COMPARED_BLOCKS, len(blocks))))
    before, after = (_mean_loss(model, compared, _COMPARED_BLOCKS) for model in (original, exchanged))
    logger.warning(
        f"The activation {original.config.activation_function} of the checkpoint was exchanged for "
        f"{exchanged.config.activation_function}: on {len(compared)} blocks its loss goes from {before:.6f} to "
        f"{after:.6f} nats a token"
    )


@torch.no_grad()
def _mean_loss(model: GPT2LMHeadModel, blocks: TokenBlocks, batch_size: int) -> float:
    """Mean over every predicted token, in nats."""
    training = model.training
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(blocks), batch_size):
        batch = blocks.__getitems__(range(start, min(start + batch_size, len(blocks))))
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        total += token_losses(logits, batch["labels"]).double().sum().item()
        count += int((batch["labels"] != IGNORED).sum())
    model.train(training)
    return total / count


def _cut_positions(model: GPT2LMHeadModel, context_length: int) -> None:
    positions = model.transformer.wpe
    model.transformer.wpe = nn.Embedding.from_pretrained(positions.weight[:context_length].clone(), freeze=False)
    model.config.n_positions = context_length
