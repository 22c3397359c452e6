"""The paper's MLP, the recipe that its benchmarks share, and a rival gate for it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS, ACT2FN

from hf_lgelu import MLPConfig, MLPForClassification
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData, DataOptions, ModelOptions, collate_rows
from lgelu_lab.benchmarks.metrics import classification_scores


def build_mlp(activation: str, data: BenchmarkData, options: ModelOptions | None = None) -> MLPForClassification:
    """The paper's MLP, 4 hidden layers of 256 units, for these rows; weights from torch's global generator."""
    names = dict(enumerate(data.label_names))
    config = MLPConfig(
        num_features=data.train.num_features,
        hidden_act=activation,
        id2label=names,
        label2id={name: index for index, name in names.items()},
    )
    return MLPForClassification(config)


PAPER_RECIPE = {"optim": "sgd", "learning_rate": 5e-2, "weight_decay": 1e-4}
_OUR_RECIPE = {
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "per_device_eval_batch_size": 2048,
    # The rows are tensors, not a datasets.Dataset: there are no columns to remove.
    "remove_unused_columns": False,
}


def mlp_benchmark(
    name: str,
    *,
    load: Callable[[DataOptions | None], BenchmarkData],
    train_batch_size: int,
    epochs: int,
) -> Benchmark:
    """A row of BENCHMARKS whose model is that MLP."""
    sizes = {"per_device_train_batch_size": train_batch_size, "num_train_epochs": epochs}
    return Benchmark(
        name=name,
        load=lambda options=None, model=None: load(options),  # the rows do not depend on the model
        build_model=build_mlp,
        collate=collate_rows,
        compute_metrics=classification_scores,
        metric="accuracy",
        greater_is_better=True,
        defaults={**PAPER_RECIPE, **_OUR_RECIPE, **sizes},
    )


SWISH_NAME = "learnable_swish"


class LearnableSwish(nn.Module):
    """x·σ(βx) with one learned β per layer, 1 at the start (Ramachandran, Zoph and Le, arXiv:1710.05941).

    A rival with one parameter a layer, for the study `related`. β = 1 is SiLU, β → ∞ is ReLU. Trainer gives β the
    learning rate and the weight decay of the weights.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.slope * x)


def register_learnable_swish() -> None:
    """Make "learnable_swish" an activation string of transformers configs. Idempotent."""
    for table in (ACT2CLS, ACT2FN):
        table[SWISH_NAME] = LearnableSwish
