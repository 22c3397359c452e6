"""Gated units without training: small LLaMAs (SwiGLU, GEGLU) on WikiText-2, trained, converted, compared.

No benchmark of this project has gated units, so this trains some: 4 layers of width 128, with the data, the tokenizer
and the recipe of gpt2-wikitext2.
"""

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import hf_lgelu
from hf_lgelu.environment import hardware, package_versions
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements.networks import evaluate

_SEQUENCES = 64  # of 128 tokens: 8,192
_HIDDEN = 344  # 8/3 of the width, as in LLaMA
_EPOCHS = 6


def load_texts(data_dir: str | None = None) -> tuple[Benchmark, BenchmarkData]:
    """The benchmark whose data and recipe are taken, and its data."""
    benchmark = BENCHMARKS["gpt2-wikitext2"]
    return benchmark, benchmark.load(DataOptions(data_dir=data_dir), benchmark.model_options({}))


def measure_gated(
    activation: str, seed: int, benchmark: Benchmark, data: BenchmarkData, epochs: int = _EPOCHS
) -> dict[str, Any]:
    """Train one network with "silu" or "gelu" gates, convert it, and compare both on the validation sequences."""
    model = _train(activation, seed, epochs, benchmark, data)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(data.train), generator=generator)[:_SEQUENCES].tolist()
    inputs = {"input_ids": benchmark.collate([data.train[index] for index in chosen])["input_ids"]}
    converted, report = hf_lgelu.convert_to_relu(model, inputs)
    scores = evaluate(model, benchmark, data)
    return {
        "activation": activation,
        "seed": seed,
        "epochs": epochs,
        "tokens": report.rows,
        "original": scores["perplexity"],
        "direct": scores["relu_perplexity"],
        "refit": evaluate(converted, benchmark, data)["perplexity"],
        "kl_direct": report.held_out.direct.kl,
        "kl_refit": report.held_out.refitted.kl,
        "eval_sequences": len(data.eval),
        "cpu": hardware(1)["cpu"],
        "torch": torch.__version__,
        "transformers": package_versions()["transformers"],
    }


def _train(activation: str, seed: int, epochs: int, benchmark: Benchmark, data: BenchmarkData) -> LlamaForCausalLM:
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(data.processor), hidden_size=128, intermediate_size=_HIDDEN, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=128, hidden_act=activation, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    recipe = dict(benchmark.defaults) | {"num_train_epochs": epochs}
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            folder, seed=seed, disable_tqdm=True, save_strategy="no", report_to="none", logging_strategy="no", **recipe
        )
        model = LlamaForCausalLM(config)
        trainer = Trainer(model=model, args=training, train_dataset=data.train, data_collator=benchmark.collate)
        trainer.train()
    return model.eval()
