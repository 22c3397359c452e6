"""The benchmarks: a data set, a model, a metric and a recipe each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import EvalPrediction, PreTrainedModel

from hf_lgelu.benchmarks import adult, fashion_mnist
from hf_lgelu.benchmarks.adult import load_adult
from hf_lgelu.benchmarks.data import BenchmarkData
from hf_lgelu.benchmarks.digits import load_digits
from hf_lgelu.benchmarks.fashion_mnist import load_fashion_mnist
from hf_lgelu.benchmarks.metrics import accuracy
from hf_lgelu.benchmarks.options import DataOptions
from hf_lgelu.benchmarks.rows import Batch, collate_rows
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

__all__ = ["BENCHMARKS", "Benchmark", "BenchmarkData", "DataOptions", "build_mlp"]


@dataclass(frozen=True)
class Benchmark:
    """One model–dataset pair.

    Args:
        name: its key in BENCHMARKS.
        description: one line.
        hub_id: the data set on the Hugging Face Hub, or None if a package brings it.
        folder: its folder in a data directory, or None likewise.
        load: options → rows.
        build_model: (activation name of transformers, rows) → a freshly initialized model.
        collate: the data collator that goes with the rows.
        compute_metrics: Trainer's function of the same name; its result holds `metric`.
        metric: the score a run is selected by.
        greater_is_better: of `metric`.
        init_hardness: λ₀ of `uniform`, and the low end of the other init modes.
        defaults: the recipe, as values of TrainingArguments for one process.
        paper: the names in `defaults` whose values the paper (arXiv:2603.21991) gives. The others, and
            `init_hardness`, are ours.
    """

    name: str
    description: str
    hub_id: str | None
    folder: str | None
    load: Callable[[DataOptions | None], BenchmarkData]
    build_model: Callable[[str, BenchmarkData], PreTrainedModel]
    collate: Callable[[Batch | Sequence[Batch]], Batch]
    compute_metrics: Callable[[EvalPrediction], dict[str, float]]
    metric: str
    greater_is_better: bool
    init_hardness: float
    defaults: Mapping[str, Any]
    paper: frozenset[str]

    @property
    def train_batch_size(self) -> int:
        """Rows of one optimizer update, over all processes."""
        return self.defaults["per_device_train_batch_size"]


def build_mlp(activation: str, data: BenchmarkData) -> MLPForClassification:
    """The paper's MLP, 4 hidden layers of 256 units, for these rows; weights from torch's global generator."""
    names = dict(enumerate(data.label_names))
    config = MLPConfig(
        num_features=data.num_features,
        hidden_act=activation,
        id2label=names,
        label2id={name: index for index, name in names.items()},
    )
    return MLPForClassification(config)


_PAPER_MLP_RECIPE = {"optim": "sgd", "learning_rate": 5e-2, "weight_decay": 1e-4}
_OUR_MLP_RECIPE = {
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "per_device_eval_batch_size": 2048,
    # The rows are tensors, not a datasets.Dataset: there are no columns to remove.
    "remove_unused_columns": False,
}


def _mlp_benchmark(name: str, description: str, *, train_batch_size: int, epochs: int, **fields: Any) -> Benchmark:
    sizes = {"per_device_train_batch_size": train_batch_size, "num_train_epochs": epochs}
    return Benchmark(
        name=name,
        description=description,
        build_model=build_mlp,
        collate=collate_rows,
        compute_metrics=accuracy,
        metric="accuracy",
        greater_is_better=True,
        init_hardness=1.0067,
        defaults={**_PAPER_MLP_RECIPE, **_OUR_MLP_RECIPE, **sizes},
        **fields,
    )


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        _mlp_benchmark(
            "mlp-digits",
            "4 × 256 MLP on scikit-learn's 8x8 digits; not in the paper, for a look within seconds",
            hub_id=None,
            folder=None,
            load=load_digits,
            train_batch_size=64,
            epochs=60,
            paper=frozenset(_PAPER_MLP_RECIPE),
        ),
        _mlp_benchmark(
            "mlp-adult",
            "4 × 256 MLP on Adult (census income), one-hot and standardized",
            hub_id=adult.HUB_ID,
            folder=adult.FOLDER,
            load=load_adult,
            train_batch_size=512,
            epochs=50,
            paper=frozenset({*_PAPER_MLP_RECIPE, "num_train_epochs"}),
        ),
        _mlp_benchmark(
            "mlp-fmnist",
            "4 × 256 MLP on Fashion-MNIST, flattened and standardized",
            hub_id=fashion_mnist.HUB_ID,
            folder=fashion_mnist.FOLDER,
            load=load_fashion_mnist,
            train_batch_size=1024,
            epochs=50,
            paper=frozenset({*_PAPER_MLP_RECIPE, "num_train_epochs"}),
        ),
    )
}
