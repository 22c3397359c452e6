"""Networks that others trained, as benchmarks: fine-tuned, hardened, swapped early. Not in the paper.

Their conversion without training is scripts/convert_zoo.py, on the same samples.
"""

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_lgelu import replace_activations, substitute_relu
from hf_lgelu.activation.gates import GATES
from hf_lgelu.networks.sites import SMOOTH_KINDS
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import Batch, BenchmarkData, DataOptions, ModelOptions, collate_rows
from lgelu_lab.benchmarks.metrics import classification_scores, language_scores, token_losses
from lgelu_lab.benchmarks.real_inputs import joined, read_samples
from lgelu_lab.benchmarks.real_networks import REAL, load_network
from lgelu_lab.benchmarks.token_blocks import TokenBlocks

_EVALUATED_BLOCKS = 32
_TRAINED_BLOCKS = 800
"""100 steps of 8; the first of the order in which a conversion takes them."""


@lru_cache(1)
def _loaded(name: str, packages: str | None) -> tuple[PreTrainedModel, Any]:
    return load_network(REAL[name], None if packages is None else Path(packages))


class Samples(list[Batch]):
    """Rows of texts of different lengths: tokens (T,), label (1,)."""

    @property
    def labels(self) -> torch.Tensor:
        """(N,), the classes."""
        return torch.cat([sample["labels"] for sample in self])

    def to(self, device: torch.device) -> "Samples":
        """The same rows on another device."""
        return Samples({key: tensor.to(device) for key, tensor in sample.items()} for sample in self)

    @classmethod
    def of_batches(cls, batches: Sequence[Batch]) -> "Samples":
        """Of batches of one."""
        return cls({key: tensor.reshape(-1) for key, tensor in batch.items()} for batch in batches)


def collate_samples(samples: Sequence[Batch]) -> Batch:
    """One batch of `Samples`, padded behind with 0."""
    rows = [{key: row if key == "labels" else row[None] for key, row in sample.items()} for sample in samples]
    return joined(rows, pad=0)


def _load(name: str, options: DataOptions | None = None, model: ModelOptions | None = None) -> BenchmarkData:
    """The samples that the network's conversion is fitted and judged on, those to judge on ordered by length."""
    options, model, network = options or DataOptions(), model or ModelOptions(), REAL[name]
    corpus, (_, processor) = network.corpus, _loaded(name, model.pretrained)
    found = corpus.load(options.data_dir)
    limits = {corpus.fit_split: options.max_train_samples, corpus.eval_split: options.max_eval_samples}
    train, evaluated = (
        read_samples(network, found.splits[split], processor, limit, options.split_seed)
        for split, limit in limits.items()
    )
    told: dict[str, Any] = {"eval_split": corpus.eval_split, "origin": found.origin}
    if network.task == "text":
        blocks = (TokenBlocks(torch.cat([row["input_ids"] for row in rows])) for rows in (train, evaluated))
        return BenchmarkData(*blocks, label_names=(), processor=processor, **told)
    evaluated.sort(key=lambda row: row["input_ids"].shape[1])
    names = tuple(map(str, range(_loaded(name, model.pretrained)[0].config.num_labels)))
    return BenchmarkData(Samples.of_batches(train), Samples.of_batches(evaluated), label_names=names, **told)


def _build(name: str, activation: str, data: BenchmarkData, options: ModelOptions) -> PreTrainedModel:
    """A copy of the network with its smooth gates as they are, λ-gates at λ = 1, or ReLU."""
    model = copy.deepcopy(_loaded(name, options.pretrained)[0])
    if activation in GATES:
        replace_activations(model, gate=activation)
    elif activation == "relu":
        substitute_relu(model, kinds=SMOOTH_KINDS)
    elif activation != getattr(model.config, "hidden_act", activation):
        raise ValueError(f"{name} was trained with {model.config.hidden_act}, not with {activation}")
    return model


def _pretrained(
    name: str, collate: Callable[[Sequence[Batch]], Batch], recipe: dict[str, Any], **values: Any
) -> Benchmark:
    common = {
        "optim": "adamw_torch", "learning_rate": 5e-5, "weight_decay": 1e-2, "lr_scheduler_type": "linear",
        "warmup_steps": 0.05, "per_device_train_batch_size": 8, "remove_unused_columns": False,
    }  # fmt: skip
    return Benchmark(
        name, partial(_load, name), partial(_build, name), collate, **values,
        defaults=common | recipe, model_defaults={"pretrained": None}, keeps_rows=True,
    )  # fmt: skip


REACTIONS = _pretrained(
    "reactions",
    collate_samples,
    compute_metrics=classification_scores,
    metric="accuracy",
    greater_is_better=True,
    recipe={
        "num_train_epochs": 1,
        "per_device_eval_batch_size": 32,
        "train_sampling_strategy": "group_by_length",
    },
)
SMOLLM2 = _pretrained(
    "smollm2",
    collate_rows,
    compute_metrics=language_scores,
    preprocess_logits=token_losses,
    metric="perplexity",
    greater_is_better=False,
    recipe={
        "num_train_epochs": 4, "per_device_eval_batch_size": 4,
        "max_train_samples": _TRAINED_BLOCKS, "max_eval_samples": _EVALUATED_BLOCKS,
    },
)  # fmt: skip
