"""What a benchmark is: a data set, a model, a metric and a recipe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import EvalPrediction, PreTrainedModel

from lgelu_lab.benchmarks.data import Batch, BenchmarkData, DataOptions, ModelOptions

PAPER_INIT_HARDNESS = 1.0067
"""λ₀ = 1 + softplus(−5), from which the paper's curves come out; the paper does not give it."""


@dataclass(frozen=True)
class Benchmark:
    """One model–dataset pair.

    Args:
        name: its key in BENCHMARKS.
        load: (options of the data, options of the model) → rows; the model's tokenizer or image size may
            decide what a row is.
        build_model: (activation name of transformers, rows, options) → a freshly initialized model, or a
            pretrained one.
        collate: the data collator that goes with the rows.
        compute_metrics: Trainer's function of the same name; its result holds `metric`.
        metric: the score a run is selected by.
        greater_is_better: of `metric`.
        init_hardness: λ₀ of `uniform`, and the low end of the other init modes.
        defaults: the recipe, as values of TrainingArguments for one process.
        preprocess_logits: Trainer's `preprocess_logits_for_metrics`, where logits are too large to keep.
        model_defaults: the fields of `ModelOptions` that the benchmark takes, and their values.
        cpu_defaults: what replaces part of `defaults` under `--recipe cpu`: ours, for the whole data on a few CPU
            cores; a value may be one of `RunArguments`. Empty where there is none.
        pretrained_defaults: the recipe that replaces part of `defaults` where a checkpoint is fine-tuned.
        pretrained_model_defaults: what replaces `model_defaults` there; None takes the same. What it does
            not name is the checkpoint's own.
        keeps_rows: record the loss of each evaluated row, for few rows.
    """

    name: str
    load: Callable[[DataOptions | None, ModelOptions | None], BenchmarkData]
    build_model: Callable[[str, BenchmarkData, ModelOptions], PreTrainedModel]
    collate: Callable[[Batch | Sequence[Batch]], Batch]
    compute_metrics: Callable[[EvalPrediction], dict[str, float]]
    metric: str
    greater_is_better: bool
    defaults: Mapping[str, Any]
    init_hardness: float = PAPER_INIT_HARDNESS
    preprocess_logits: Callable[[Any, Any], Tensor] | None = None
    model_defaults: Mapping[str, Any] = field(default_factory=dict)
    cpu_defaults: Mapping[str, Any] = field(default_factory=dict)
    pretrained_defaults: Mapping[str, Any] = field(default_factory=dict)
    pretrained_model_defaults: Mapping[str, Any] | None = None
    keeps_rows: bool = False

    def model_options(self, given: Mapping[str, Any]) -> ModelOptions:
        """The benchmark's model options with those `given` that are not None in their place.

        Raises ValueError for an option that the benchmark does not take.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        defaults, condition = self.model_defaults, ""
        if "pretrained" in chosen and self.pretrained_model_defaults is not None:
            defaults, condition = self.pretrained_model_defaults, " with a pretrained checkpoint"
        foreign = sorted(chosen.keys() - defaults.keys())
        if foreign:
            raise ValueError(
                f"{self.name} takes no {', '.join(foreign)}{condition}; of the model it takes "
                f"{', '.join(defaults) or 'no option'}"
            )
        return ModelOptions(**{**defaults, **chosen})

    def trainer_options(self, data: BenchmarkData) -> dict[str, Any]:
        """What a Trainer of this benchmark's models is given beside model, arguments and rows."""
        return {
            "data_collator": self.collate,
            "compute_metrics": self.compute_metrics,
            "preprocess_logits_for_metrics": self.preprocess_logits,
            "processing_class": data.processor,
        }
