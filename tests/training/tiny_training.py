"""A tiny classifier, its data, its trainers, and a record of the λ that its forward passes really used."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.activations import ACT2FN
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_lgelu import LambdaGELU, LambdaGELUTrainer, LambdaGELUTrainingArguments

FEATURES, CLASSES = 5, 3


class TinyConfig(PreTrainedConfig):
    """Two hidden layers of 8."""

    model_type = "tiny_for_training"

    hidden_act: str = "lambda_gelu"
    hidden_size: int = 8
    num_hidden_layers: int = 2
    dropout: float = 0.0


class TinyClassifier(PreTrainedModel):
    """Linear → activation → LayerNorm → dropout, a few times; then a classifier."""

    config: TinyConfig
    main_input_name = "features"
    accepts_loss_kwargs = False

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        sizes = [FEATURES] + [config.hidden_size] * config.num_hidden_layers
        pairs = list(itertools.pairwise(sizes))
        self.linears = nn.ModuleList(nn.Linear(*pair) for pair in pairs)
        self.activations = nn.ModuleList(ACT2FN[config.hidden_act] for _ in pairs)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, CLASSES)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Wide enough for the activations to matter, and for λ to have a gradient.
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.6)
            nn.init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> SequenceClassifierOutput:
        hidden = features
        for linear, activation in zip(self.linears, self.activations, strict=True):
            hidden = self.dropout(activation(linear(hidden)))
        logits = self.classifier(self.norm(hidden))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def tiny_model(hidden_act: str = "lambda_gelu", seed: int = 0, **options: Any) -> TinyClassifier:
    """The same weights for the same seed and sizes, whatever the activation."""
    torch.manual_seed(seed)
    return TinyClassifier(TinyConfig(hidden_act=hidden_act, **options))


def rows(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Samples with labels that a small network can learn, but not at once."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, FEATURES, generator=generator)
    labels = (features[:, :CLASSES] + 0.3 * torch.randn(count, CLASSES, generator=generator)).argmax(-1)
    return [{"features": x, "labels": y} for x, y in zip(features, labels, strict=True)]


def batch(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


ARGUMENTS = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 0.02,
    "num_train_epochs": 1,
}


def tiny_trainer(
    folder: Path, model: nn.Module | None = None, *, plain: bool = False, train: Any = None, **options: Any
) -> Trainer:
    """A LambdaGELUTrainer, or transformers' own if `plain`. `options`: arguments of the trainer or its args."""
    of_trainer = {
        name: options.pop(name)
        for name in (
            "eval_dataset",
            "compute_metrics",
            "preprocess_logits_for_metrics",
            "callbacks",
            "optimizers",
            "optimizer_cls_and_kwargs",
            "data_collator",
        )
        if name in options
    }
    arguments_class = TrainingArguments if plain else LambdaGELUTrainingArguments
    args = arguments_class(output_dir=str(folder), **{**ARGUMENTS, **options})
    model = tiny_model() if model is None else model
    train = rows(12) if train is None else train
    return (Trainer if plain else LambdaGELUTrainer)(model=model, args=args, train_dataset=train, **of_trainer)


def lambda_gelus(model: nn.Module) -> list[LambdaGELU]:
    return [module for module in model.modules() if isinstance(module, LambdaGELU)]


def raw_values(model: nn.Module) -> list[float]:
    return [module.raw_hardness.item() for module in lambda_gelus(model)]


def hardness_values(model: nn.Module) -> list[float]:
    return [module.hardness.item() for module in lambda_gelus(model)]


@dataclass
class Forwards:
    """λ and s of every forward pass, in order; those that trained and those that evaluated."""

    trained: list[list[float]] = field(default_factory=list)
    evaluated: list[list[float]] = field(default_factory=list)
    trained_raw: list[list[float]] = field(default_factory=list)


@contextmanager
def watched(model: nn.Module) -> Iterator[Forwards]:
    """Read λ where it counts: at each forward pass, not in a callback that may run too early or too late."""
    seen = Forwards()

    def note(module: nn.Module, *_: Any) -> None:
        if module.training:
            seen.trained.append(hardness_values(model))
            seen.trained_raw.append(raw_values(model))
        elif lambda_gelus(model):  # not the substituted pass
            seen.evaluated.append(hardness_values(model))

    handle = model.register_forward_pre_hook(note)
    yield seen
    handle.remove()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_state(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert state.keys() == other.keys()
    different = [name for name in state if not torch.equal(state[name], other[name])]
    assert not different


def names_in(model: nn.Module, group: dict[str, Any]) -> list[str]:
    """Of the parameters of an optimizer's group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return sorted(names[id(parameter)] for parameter in group["params"])


class Layerwise(torch.optim.Optimizer):
    """As transformers' LayerWiseDummyOptimizer: groups that hold a dummy."""

    def __init__(self, parameters):
        super().__init__([torch.empty(1)], {"lr": 0.1})


class Fused(torch.optim.SGD):
    """As LOMO: ordinary groups, and an update inside backward that does not look at them."""

    def fused_backward(self, loss, lr): ...
