"""What is timed: λ-GELU in its forms, the activations that it competes with, and a copy as the floor."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.utils import logging

import hf_lgelu
from hf_lgelu.activation.kernels import KERNELS
from hf_lgelu.activation.kernels.choice import choose_kernel
from lgelu_lab.benchmarks.mlp import LearnableSwish

REFERENCE = "gelu"
FLOOR = "copy"

_SMALLEST_LEARNED = 1.000001  # a learnable λ is above 1


@dataclass(frozen=True)
class Provider:
    """One way to compute an activation.

    Attributes:
        name: key in PROVIDERS.
        label: in the figure and the table.
        build: (input, λ) → a module; those without a λ ignore it. Raises ImportError or RuntimeError, with the
            reason, where it is unavailable.
        has_hardness: whether λ matters; then it is measured at each.
        compiled: whether torch.compile makes it.
        kernel: the row of KERNELS that is asked for, or None.
    """

    name: str
    label: str
    build: Callable[[Tensor, float], nn.Module]
    has_hardness: bool = False
    compiled: bool = False
    kernel: str | None = None


class Copy(nn.Module):
    """The least that an activation moves: forward reads x and writes y, backward reads x and δ and writes dx."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().clone()

    def backward(self, x: Tensor, delta: Tensor) -> Tensor:
        return torch.add(x.detach(), delta)


class NamedKernel(nn.Module):
    """`hf_lgelu.lambda_gelu` by the named kernel, with λ itself as the parameter."""

    def __init__(self, kernel: str, hardness: float) -> None:
        super().__init__()
        self.kernel = kernel
        self.hardness = nn.Parameter(torch.tensor([hardness]))

    def forward(self, x: Tensor) -> Tensor:
        return hf_lgelu.lambda_gelu(x, self.hardness, kernel=self.kernel)


def kernel_taken(provider: Provider, module: nn.Module, x: Tensor) -> str:
    """The row of KERNELS that computes it, "inductor" for compiled code, "torch" for what torch itself has."""
    if provider.compiled:
        return "inductor"
    if not provider.has_hardness:
        return "torch"
    return choose_kernel(x, module.hardness, provider.kernel).name


def check_providers(names: list[str]) -> list[Provider]:
    """The rows of PROVIDERS of these names, all of them for none; the reference always comes first.

    Raises ValueError for an unknown name.
    """
    unknown = sorted(set(names) - set(PROVIDERS))
    if unknown:
        raise ValueError(f"unknown providers: {', '.join(unknown)}; accepted: {', '.join(PROVIDERS)}")
    chosen = set(names or PROVIDERS) | {REFERENCE}
    return [provider for name, provider in PROVIDERS.items() if name in chosen]


def _plain(build: Callable[[], nn.Module]) -> Callable[[Tensor, float], nn.Module]:
    return lambda x, hardness: build().to(x.device, x.dtype)


def _learning(x: Tensor, hardness: float) -> nn.Module:
    return hf_lgelu.LambdaGELU(init_hardness=max(hardness, _SMALLEST_LEARNED)).to(x.device)


def _frozen(x: Tensor, hardness: float) -> nn.Module:
    module = _learning(x, hardness)
    module.hardness_override.fill_(hardness)
    return module


def _named(kernel: str) -> Callable[[Tensor, float], nn.Module]:
    def build(x: Tensor, hardness: float) -> nn.Module:
        module = NamedKernel(kernel, hardness).to(x.device)
        choose_kernel(x, module.hardness, kernel)
        return module

    return build


def _compiled(build: Callable[[Tensor, float], nn.Module]) -> Callable[[Tensor, float], nn.Module]:
    def compile_it(x: Tensor, hardness: float) -> nn.Module:
        if x.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise RuntimeError("torch.compile needs a C++ compiler, and there is none on the PATH")
        # Whole graph or an error: a graph that breaks or recompiles too often would be timed as plain torch.
        return torch.compile(build(x, hardness), dynamic=False, fullgraph=True)

    return compile_it


def _xielu(x: Tensor, hardness: float) -> nn.Module:
    from transformers.activations import XIELUActivation

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns that its CUDA package is not installed
    try:
        return XIELUActivation(dtype=x.dtype).to(x.device)
    finally:
        logging.set_verbosity(verbosity)


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider(REFERENCE, "GELU (erf)", _plain(nn.GELU)),
        Provider("lambda_gelu", "λ-GELU", _learning, has_hardness=True),
        Provider("lambda_gelu_frozen", "λ-GELU, λ frozen", _frozen, has_hardness=True),
        *(
            Provider(f"lambda_gelu:{name}", f"λ-GELU, kernel {name}", _named(name), has_hardness=True, kernel=name)
            for name in KERNELS
        ),
        Provider("gelu_tanh", "GELU (tanh)", _plain(lambda: nn.GELU(approximate="tanh"))),
        Provider("relu", "ReLU", _plain(nn.ReLU)),
        Provider("silu", "SiLU", _plain(nn.SiLU)),
        Provider("prelu", "PReLU", _plain(nn.PReLU)),
        Provider("swish_beta", "Swish, learnable β", _plain(LearnableSwish)),
        Provider("xielu", "xIELU (transformers)", _xielu),
        Provider("gelu_compiled", "GELU, compiled", _compiled(_plain(nn.GELU)), compiled=True),
        Provider("lambda_gelu_compiled", "λ-GELU, compiled", _compiled(_learning), has_hardness=True, compiled=True),
        Provider(FLOOR, "copy (floor)", lambda x, hardness: Copy()),
    )
}
"""In the order of the table's rows."""
