"""How much an epoch costs through LambdaGELUTrainer, against a bare loop over tensors.

The same MLP, the same SGD, the same number of rows (random ones of Fashion-MNIST's shape), one epoch
each in turn; prints the median of the ratios. `python scripts/bench_trainer.py`
"""

import statistics
import tempfile
import time
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F
from transformers import HfArgumentParser, PrinterCallback

from hf_lgelu import LambdaGELUTrainer, LambdaGELUTrainingArguments, hardness_parameter_groups
from hf_lgelu.benchmarks.rows import TensorRows, collate_rows
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

FEATURES, CLASSES = 784, 10


@dataclass
class BenchArguments:
    """Size of the comparison."""

    rows: int = field(default=60_000, metadata={"help": "Training rows in an epoch."})
    batch_size: int = field(default=256, metadata={"help": "Rows in a batch."})
    rounds: int = field(default=5, metadata={"help": "Epochs of each kind; one more of each warms up."})
    activation: str = field(default="lambda_gelu", metadata={"help": "Activation of the MLP."})


def main() -> None:
    """Time both, in turn."""
    (arguments,) = HfArgumentParser(BenchArguments).parse_args_into_dataclasses()
    torch.manual_seed(0)
    rows = TensorRows(torch.randn(arguments.rows, FEATURES), torch.randint(0, CLASSES, (arguments.rows,)))
    config = MLPConfig(num_features=FEATURES, num_labels=CLASSES, hidden_act=arguments.activation)
    seconds: dict[str, list[float]] = {"trainer": [], "bare loop": []}
    for _ in range(arguments.rounds + 1):
        seconds["trainer"].append(_trainer_epoch(MLPForClassification(config), rows, arguments.batch_size))
        seconds["bare loop"].append(_bare_epoch(MLPForClassification(config), rows, arguments.batch_size))
    measured = {name: values[1:] for name, values in seconds.items()}
    ratios = [trainer / bare for trainer, bare in zip(measured["trainer"], measured["bare loop"], strict=True)]
    for name, values in measured.items():
        print(f"{name}: median {statistics.median(values):.3f} s an epoch of {arguments.rows} rows")
    print(
        f"ratio trainer / bare loop: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f} "
        f"({torch.get_num_threads()} threads, torch {torch.__version__})"
    )


def _trainer_epoch(model: MLPForClassification, rows: TensorRows, batch_size: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        arguments = LambdaGELUTrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch_size, num_train_epochs=1, optim="sgd",
            learning_rate=5e-2, weight_decay=1e-4, lr_scheduler_type="constant", max_grad_norm=0.0,
            logging_strategy="epoch", save_strategy="no", report_to="none", disable_tqdm=True, log_level="error",
            remove_unused_columns=False, dataloader_pin_memory=False, require_lambda_gelu=False,
        )  # fmt: skip
        trainer = LambdaGELUTrainer(model=model, args=arguments, train_dataset=rows, data_collator=collate_rows)
        trainer.remove_callback(PrinterCallback)
        started = time.perf_counter()
        trainer.train()
        return time.perf_counter() - started


def _bare_epoch(model: MLPForClassification, rows: TensorRows, batch_size: int) -> float:
    if model.config.hidden_act == "lambda_gelu":
        groups = hardness_parameter_groups(model, learning_rate=5e-2, weight_decay=1e-4)
    else:
        groups = [{"params": list(model.parameters()), "lr": 5e-2, "weight_decay": 1e-4}]
    optimizer = torch.optim.SGD(groups)
    model.train()
    started = time.perf_counter()
    order = torch.randperm(len(rows))
    for start in range(0, len(rows), batch_size):
        chosen = order[start : start + batch_size]
        logits = model(features=rows.features[chosen]).logits
        F.cross_entropy(logits, rows.labels[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
