"""Whole training steps (forward, loss, backward, optimizer) of a model with one activation or another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_lgelu import MLPConfig, MLPForClassification, anneal_hardness, freeze_hardness, hardness_parameter_groups
from hf_lgelu.activation.hardness import DEFAULT_INIT_HARDNESS, hardness_for_tolerance
from hf_lgelu.activation.kernels.choice import choose_kernel
from hf_lgelu.models.sites import lambda_gelu_modules
from lgelu_lab.benchmarks.cifar_resnet import new_cifar_resnet
from lgelu_lab.benchmarks.wikitext import CONTEXT_LENGTH, VOCABULARY_SIZE
from lgelu_lab.kernel_bench.cases import DTYPES
from lgelu_lab.kernel_bench.memory import peak_bytes, resident_bytes
from lgelu_lab.kernel_bench.operation import Pace, summary_numbers
from lgelu_lab.kernel_bench.providers import REFERENCE
from lgelu_lab.kernel_bench.results import ResultsFile, Row, number_text
from lgelu_lab.kernel_bench.timing import CLOCKS, Call, clock_name, interleave, summarize

STEP_MODE = "step"
LEARNING, HARDENED = "lambda_gelu", "lambda_gelu_hardened"
ACTIVATIONS = {
    REFERENCE: "gelu",
    LEARNING: "lambda_gelu",
    HARDENED: "lambda_gelu",
    "relu": "relu",
    "silu": "silu",
}
"""Provider → the activation's name in transformers and timm. Hardened: λ overridden by its target, s frozen."""

_CLASSES = 10
_WEIGHT_DECAY = 1e-2


@dataclass(frozen=True)
class StepModel:
    """A model and its batch.

    Attributes:
        name: key in STEP_MODELS.
        devices: where a step takes seconds at most.
        build: the activation's name → a model in training mode.
        new_batch: device → its arguments, random; labels included.
        optimizer: (parameters or groups, learning rate) → an optimizer.
        learning_rate: of it.
    """

    name: str
    devices: tuple[str, ...]
    build: Callable[[str], nn.Module]
    new_batch: Callable[[str], dict[str, Tensor]]
    optimizer: Callable[..., torch.optim.Optimizer]
    learning_rate: float


@dataclass(frozen=True)
class Training:
    """One provider's model, its optimizer and the call that trains it for a step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Call


def check_step_models(names: list[str], device: str) -> list[StepModel]:
    """The rows of STEP_MODELS of these names; for none, all that are meant for the device.

    Raises ValueError for an unknown name.
    """
    unknown = sorted(set(names) - set(STEP_MODELS))
    if unknown:
        raise ValueError(f"unknown models: {', '.join(unknown)}; accepted: {', '.join(STEP_MODELS)}")
    return [row for row in STEP_MODELS.values() if (row.name in names if names else device in row.devices)]


def measure_steps(
    row: StepModel, dtype: str, threads: int, device: str, allocator: str, pace: Pace, results: ResultsFile
) -> Iterator[Row]:
    """Steps of every row of ACTIVATIONS in turn, if the results lack one; yield each row after it is written."""
    torch.set_num_threads(threads)
    batch = row.new_batch(device)
    trainings = {provider: new_training(row, provider, batch, dtype, device) for provider in ACTIVATIONS}
    blanks = {
        provider: Row(
            provider=provider,
            kernel=_kernel_of(training.model, dtype),
            mode=STEP_MODE,
            size=row.name,
            memory_format="",
            elements=str(sum(p.numel() for p in training.model.parameters())),
            dtype=dtype,
            hardness=_HARDNESS.get(provider, ""),
            threads=str(threads),
            allocator=allocator,
            clock=clock_name(device, threads),
        )
        for provider, training in trainings.items()
    }
    if all(blank in results for blank in blanks.values()):
        return
    calls = {provider: training.step for provider, training in trainings.items()}
    clock = CLOCKS[clock_name(device, threads)]
    summaries = summarize(interleave(calls, clock, pace.rounds, pace.seconds), REFERENCE)
    peaks = {provider: _peak_bytes(training, batch, device) for provider, training in trainings.items()}
    for provider, blank in blanks.items():
        if blank not in results:
            memory = {"peak_bytes": peaks[provider], "peak_ratio": peaks[provider] / peaks[REFERENCE]}
            measured = blank.with_numbers(summary_numbers(summaries[provider]) | memory)
            results.append(measured)
            yield measured


def new_training(row: StepModel, provider: str, batch: dict[str, Tensor], dtype: str, device: str) -> Training:
    """The model with the provider's activation; bfloat16 and float16 by autocast, as Trainer has it."""
    torch.manual_seed(0)
    model = row.build(ACTIVATIONS[provider]).train().to(device)
    hardened = provider == HARDENED
    if hardened:
        anneal_hardness(model, 1.0)
    groups = _parameter_groups(model, row.learning_rate)
    optimizer = row.optimizer(groups, lr=row.learning_rate)

    def step() -> None:
        with torch.autocast(device, DTYPES[dtype], enabled=dtype != "float32"):
            loss = model(**batch).loss
        loss.backward()
        if hardened:
            freeze_hardness(model)
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)


def _parameter_groups(model: nn.Module, learning_rate: float) -> list[dict[str, Any]]:
    """Decayed weights, undecayed vectors and, if the model has any, s."""
    if lambda_gelu_modules(model):
        return hardness_parameter_groups(model, learning_rate, weight_decay=_WEIGHT_DECAY)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]


def _kernel_of(model: nn.Module, dtype: str) -> str:
    modules = [module for _, module in lambda_gelu_modules(model)]
    if not modules:
        return "torch"
    hardness = modules[0].hardness
    return choose_kernel(torch.zeros(8, dtype=DTYPES[dtype], device=hardness.device), hardness).name


def _peak_bytes(training: Training, batch: dict[str, Tensor], device: str) -> int:
    """Of one step, with what stays from step to step: weights, buffers, the optimizer's state and the batch."""
    training.step()
    state = [value for values in training.optimizer.state.values() for value in values.values()]
    tensors = [*training.model.parameters(), *training.model.buffers(), *batch.values()]
    tensors += [value for value in state if isinstance(value, Tensor)]
    return resident_bytes(tensors) + peak_bytes(training.step, device)


def _new_mlp(activation: str) -> nn.Module:
    return MLPForClassification(MLPConfig(num_features=784, num_labels=_CLASSES, hidden_act=activation))


def _mlp_batch(device: str) -> dict[str, Tensor]:
    return {"features": torch.randn(256, 784, device=device), "labels": _labels(256, device)}


def _new_resnet(activation: str) -> nn.Module:
    return new_cifar_resnet(activation, [str(label) for label in range(_CLASSES)], (0.0,) * 3, (1.0,) * 3)


def _image_batch(device: str) -> dict[str, Tensor]:
    size = 64 if device == "cpu" else 256
    return {"pixel_values": torch.randn(size, 3, 32, 32, device=device), "labels": _labels(size, device)}


def _new_gpt2(**sizes: int) -> Callable[[str], nn.Module]:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return lambda activation: GPT2LMHeadModel(
        GPT2Config(**sizes, **dropout, **special, activation_function=activation, use_cache=False)
    )


def _token_batch(sequences: int, length: int, vocabulary: int) -> Callable[[str], dict[str, Tensor]]:
    def new_batch(device: str) -> dict[str, Tensor]:
        tokens = torch.randint(vocabulary, (sequences, length), device=device)
        return {"input_ids": tokens, "labels": tokens}

    return new_batch


def _labels(count: int, device: str) -> Tensor:
    return torch.randint(_CLASSES, (count,), device=device)


_HARDNESS = {LEARNING: number_text(DEFAULT_INIT_HARDNESS), HARDENED: number_text(hardness_for_tolerance())}

STEP_MODELS: dict[str, StepModel] = {
    row.name: row
    for row in (
        StepModel("mlp-4x256", ("cpu", "cuda"), _new_mlp, _mlp_batch, torch.optim.SGD, 5e-2),
        StepModel(
            "gpt2-4x256",
            ("cpu",),
            _new_gpt2(n_layer=4, n_embd=256, n_head=4, n_positions=CONTEXT_LENGTH, vocab_size=VOCABULARY_SIZE),
            _token_batch(8, CONTEXT_LENGTH, VOCABULARY_SIZE),
            torch.optim.AdamW,
            5e-4,
        ),
        StepModel("resnet18-cifar", ("cpu", "cuda"), _new_resnet, _image_batch, torch.optim.AdamW, 5e-4),
        StepModel("gpt2-small", ("cuda",), _new_gpt2(), _token_batch(8, 1024, 50257), torch.optim.AdamW, 5e-4),
    )
}
"""Batches: 256 rows; 8 sequences of 128 tokens; 64 images (256 on a GPU); 8 sequences of 1024 tokens."""
