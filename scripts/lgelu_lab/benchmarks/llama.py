"""A small LLaMA (Touvron et al., 2023) on WikiText-2: gated units, SwiGLU, which harden to ReGLU.

Not in the paper. Text, tokenizer, metric and recipe are those of gpt2-wikitext2.
"""

from dataclasses import replace

from transformers import LlamaConfig, LlamaForCausalLM

from lgelu_lab.benchmarks.data import BenchmarkData, ModelOptions
from lgelu_lab.benchmarks.wikitext import GPT2_WIKITEXT2


def build_llama(activation: str, data: BenchmarkData, options: ModelOptions) -> LlamaForCausalLM:
    """A freshly initialized LLaMA for these blocks: `num_layers`, `width` and `num_heads` of the options.

    The hidden units of a block are 8/3 of the width, as in LLaMA, in whole eights (344 of 128). Input and output share
    their embedding. The tokenizer's end of text is no token of its own to this model: blocks are cut from one text.

    Raises ValueError for a width that the heads do not divide into even parts, which rotary positions need.
    """
    if options.width % (2 * options.num_heads):
        raise ValueError(
            f"num_heads must divide width into even parts, got {options.num_heads} heads of a width of {options.width}"
        )
    config = LlamaConfig(
        num_hidden_layers=options.num_layers,
        hidden_size=options.width,
        intermediate_size=8 * -(-options.width // 3),
        num_attention_heads=options.num_heads,
        max_position_embeddings=data.train.tokens.shape[1],
        vocab_size=len(data.processor),
        hidden_act=activation,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


LLAMA_WIKITEXT2 = replace(
    GPT2_WIKITEXT2,
    name="llama-wikitext2",
    build_model=build_llama,
    model_defaults={name: value for name, value in GPT2_WIKITEXT2.model_defaults.items() if name != "pretrained"},
    pretrained_defaults={},
    pretrained_model_defaults=None,
)
