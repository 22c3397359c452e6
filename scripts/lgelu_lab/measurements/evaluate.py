"""The score of a network on its benchmark, by the benchmark's own metric and batches."""

import tempfile

from transformers import PreTrainedModel

from hf_lgelu.training.trainer import LambdaGELUTrainer
from lgelu_lab.benchmarks.table import Benchmark, BenchmarkData
from lgelu_lab.studies.arguments import parse_mapping


def evaluate(model: PreTrainedModel, benchmark: Benchmark, data: BenchmarkData) -> dict[str, float]:
    """{"accuracy": …, "relu_accuracy": …, "relu_max_logit_change": …, "loss": …} on the evaluation rows.

    The relu_* are there where the model has smooth gates. In the model's dtype, on the device that accelerate
    chooses: the model is moved there.
    """
    with tempfile.TemporaryDirectory() as folder:
        _, training = parse_mapping({"benchmark": benchmark.name, "output_dir": folder, "disable_tqdm": True})
        training.require_lambda_gelu = False
        trainer = LambdaGELUTrainer(
            model=model,
            args=training,
            eval_dataset=data.eval,
            data_collator=benchmark.collate,
            compute_metrics=benchmark.compute_metrics,
            preprocess_logits_for_metrics=benchmark.preprocess_logits,
        )
        metrics = trainer.evaluation_loop(trainer.get_eval_dataloader(), "evaluation", metric_key_prefix="eval").metrics
    return {name.removeprefix("eval_"): float(value) for name, value in metrics.items()}
