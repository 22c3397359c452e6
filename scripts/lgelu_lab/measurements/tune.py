"""Further training of a network by its benchmark's recipe, with the project's trainer."""

import tempfile
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel, PrinterCallback, set_seed

from hf_lgelu.training.trainer import LambdaGELUTrainer
from lgelu_lab.benchmarks.table import Benchmark, BenchmarkData
from lgelu_lab.studies.arguments import parse_mapping


def tune(
    model: PreTrainedModel, benchmark: Benchmark, data: BenchmarkData, arguments: Mapping[str, Any], seed: int
) -> None:
    """Train `model` in place on the training rows, in an order given by `seed`; no evaluation, nothing saved.

    Args:
        model: with any gates; afterwards in eval mode.
        benchmark: whose recipe fills in what `arguments` leave open.
        data: its rows.
        arguments: of scripts/train.py, by name.
        seed: the same one gives the same rows in the same order, whatever the model.
    """
    set_seed(seed)
    quiet = {"eval_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        _, training = parse_mapping(
            {"benchmark": benchmark.name, "output_dir": folder, "seed": seed, **quiet, **arguments}
        )
        training.require_lambda_gelu = False
        trainer = LambdaGELUTrainer(
            model=model, args=training, train_dataset=data.train, data_collator=benchmark.collate
        )
        trainer.remove_callback(PrinterCallback)  # transformers prints each log where it draws no progress bar
        trainer.train()
    model.eval()
