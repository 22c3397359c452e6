"""Gated units without training: small LLaMAs (SwiGLU, GEGLU) on WikiText-2, trained, converted, compared.

No benchmark of this project has gated units, so this trains some: 4 layers of width 128, with the data, the tokenizer
and the recipe of gpt2-wikitext2. Rows go to a CSV file as they are measured; a rerun makes what is not there.

    python scripts/gated_conversion.py --csv docs/convert/gated.csv --seeds 0 1 2
"""

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.conversion_bench.csv_rows import append_row, read_rows
from lgelu_lab.measurements.networks import evaluate
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

import hf_lgelu
from hf_lgelu.environment import hardware, package_versions

_SEQUENCES = 64  # of 128 tokens: 8,192
_HIDDEN = 344  # 8/3 of the width, as in LLaMA


@dataclass
class GatedArguments:
    """What is trained and where the rows go."""

    csv: str = field(default="runs/gated.csv", metadata={"help": "File of the rows; they are added to it."})
    activations: list[str] = field(default_factory=lambda: ["silu", "gelu"], metadata={"help": "SwiGLU, GEGLU."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "One network each."})
    epochs: int = field(default=6, metadata={"help": "Of training."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "At most so many validation sequences."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the data sets."})


def main() -> int:
    """Train, convert and compare what has no row yet."""
    (arguments,) = HfArgumentParser(GatedArguments).parse_args_into_dataclasses()
    logging.disable_progress_bar()
    benchmark = BENCHMARKS["gpt2-wikitext2"]
    options = DataOptions(data_dir=arguments.data_dir, max_eval_samples=arguments.max_eval_samples)
    data = benchmark.load(options, benchmark.model_options({}))
    path = Path(arguments.csv)
    there = {(row["activation"], row["seed"]) for row in read_rows(path)}
    for seed in arguments.seeds:
        for activation in arguments.activations:
            if (activation, str(seed)) not in there:
                row = _measure(activation, seed, arguments.epochs, benchmark, data)
                append_row(path, row)
                print(row, flush=True)
    return 0


def _measure(
    activation: str, seed: int, epochs: int, benchmark: Benchmark, data: BenchmarkData
) -> dict[str, str | float | int]:
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


if __name__ == "__main__":
    sys.exit(main())
