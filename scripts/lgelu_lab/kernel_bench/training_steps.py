"""Whole training steps (forward, loss, backward, optimizer) of a model with one activation or another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pandas
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import hf_lgelu
from hf_lgelu.activation.kernels import choose_kernel
from lgelu_lab.benchmarks.cifar_resnet import new_cifar_resnet
from lgelu_lab.benchmarks.wikitext import CONTEXT_LENGTH, VOCABULARY_SIZE
from lgelu_lab.kernel_bench.measure import DTYPES, Bench
from lgelu_lab.kernel_bench.providers import REFERENCE
from lgelu_lab.kernel_bench.results import Cells, number_text
from lgelu_lab.kernel_bench.timing import Call, peak_bytes, resident_bytes

STEP_MODE = "step"
HARDENED = "lambda_gelu_hardened"
ACTIVATIONS = {name: name.removesuffix("_hardened") for name in (REFERENCE, "lambda_gelu", HARDENED, "relu", "silu")}
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


def measure_steps(row: StepModel, dtype: str, bench: Bench) -> Iterator[Cells]:
    """Steps of every row of ACTIVATIONS in turn, if the results lack one; yield each row after it is written."""
    torch.set_num_threads(bench.threads)
    batch = row.new_batch(bench.device)
    trainings = {provider: new_training(row, provider, batch, dtype, bench.device) for provider in ACTIVATIONS}
    case = {"mode": STEP_MODE, "size": row.name, "memory_format": "", "dtype": dtype}
    blanks = {
        provider: bench.cells | case | {"provider": provider} | _model_cells(model, dtype)
        for provider, (model, _, _) in trainings.items()
    }

    def add_columns(summary: pandas.DataFrame) -> None:
        peaks = {name: _peak_bytes(*training, batch, bench.device) for name, training in trainings.items()}
        summary["peak_bytes"] = pandas.Series(peaks)

    yield from bench.written_rows(blanks, {name: step for name, (_, _, step) in trainings.items()}, add_columns)


def new_training(
    row: StepModel, provider: str, batch: dict[str, Tensor], dtype: str, device: str
) -> tuple[nn.Module, torch.optim.Optimizer, Call]:
    """A model with the provider's activation, its optimizer, and a step; narrow dtypes by autocast, as in Trainer."""
    torch.manual_seed(0)
    model = row.build(ACTIVATIONS[provider]).train().to(device)
    if provider == HARDENED:
        hf_lgelu.anneal_hardness(model, 1.0)
    optimizer = row.optimizer(_parameter_groups(model, row.learning_rate), lr=row.learning_rate)

    def step() -> None:
        with torch.autocast(device, DTYPES[dtype], enabled=dtype != "float32"):
            loss = model(**batch).loss
        loss.backward()
        if provider == HARDENED:
            hf_lgelu.freeze_hardness(model)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def _parameter_groups(model: nn.Module, learning_rate: float) -> list[dict]:
    """Decayed weights, undecayed vectors and, if the model has any, s."""
    if _gates(model):
        return hf_lgelu.hardness_parameter_groups(model, learning_rate, weight_decay=_WEIGHT_DECAY)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]


def _gates(model: nn.Module) -> list[hf_lgelu.LambdaGELU]:
    return [module for module in model.modules() if isinstance(module, hf_lgelu.LambdaGELU)]


def _model_cells(model: nn.Module, dtype: str) -> Cells:
    cells = {"elements": str(sum(parameter.numel() for parameter in model.parameters()))}
    if not (gates := _gates(model)):
        return cells | {"kernel": "torch", "hardness": ""}
    hardness = gates[0].hardness.detach()
    x = torch.zeros(8, dtype=DTYPES[dtype], device=hardness.device)
    return cells | {"kernel": choose_kernel(x, hardness).name, "hardness": number_text(hardness.item())}


def _peak_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Call, batch: dict[str, Tensor], device: str
) -> int:
    """Of one step, with what stays from step to step: weights, buffers, the optimizer's state and the batch."""
    step()
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return resident_bytes([*model.parameters(), *model.buffers(), *batch.values(), *state]) + peak_bytes(step, device)


def _new_mlp(activation: str) -> nn.Module:
    config = hf_lgelu.MLPConfig(num_features=784, num_labels=_CLASSES, hidden_act=activation)
    return hf_lgelu.MLPForClassification(config)


def _new_resnet(activation: str) -> nn.Module:
    return new_cifar_resnet(activation, [str(label) for label in range(_CLASSES)], (0.0,) * 3, (1.0,) * 3)


def _new_gpt2(**sizes: int) -> Callable[[str], nn.Module]:
    fixed = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False} | sizes
    return lambda name: GPT2LMHeadModel(GPT2Config(**fixed, bos_token_id=0, eos_token_id=0, activation_function=name))


def _rows(device: str, key: str, *shape: int) -> dict[str, Tensor]:
    return {key: torch.randn(shape, device=device), "labels": torch.randint(_CLASSES, shape[:1], device=device)}


def _tokens(device: str, vocabulary: int, *shape: int) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, shape, device=device)
    return {"input_ids": tokens, "labels": tokens}


_SMALL = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": CONTEXT_LENGTH, "vocab_size": VOCABULARY_SIZE}
_BATCHES: dict[str, Callable[[str], dict[str, Tensor]]] = {
    "mlp-4x256": lambda device: _rows(device, "features", 256, 784),
    "gpt2-4x256": lambda device: _tokens(device, VOCABULARY_SIZE, 8, CONTEXT_LENGTH),
    "resnet18-cifar": lambda device: _rows(device, "pixel_values", 64 if device == "cpu" else 256, 3, 32, 32),
    "gpt2-small": lambda device: _tokens(device, 50257, 8, 1024),
}

STEP_MODELS: dict[str, StepModel] = {
    name: StepModel(name, devices, build, _BATCHES[name], optimizer, learning_rate)
    for name, devices, build, optimizer, learning_rate in (
        ("mlp-4x256", ("cpu", "cuda"), _new_mlp, torch.optim.SGD, 5e-2),
        ("gpt2-4x256", ("cpu",), _new_gpt2(**_SMALL), torch.optim.AdamW, 5e-4),
        ("resnet18-cifar", ("cpu", "cuda"), _new_resnet, torch.optim.AdamW, 5e-4),
        ("gpt2-small", ("cuda",), _new_gpt2(), torch.optim.AdamW, 5e-4),
    )
}
