"""What is timed: λ-GELU in its forms, the activations that it competes with, and a copy as the floor."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.activations import XIELUActivation

import hf_lgelu
from hf_lgelu.activation.kernels import KERNELS, choose_kernel
from hf_lgelu.activation.module import LambdaGELUTanh
from lgelu_lab.benchmarks.mlp import LearnableSwish

REFERENCE = "gelu"
FLOOR = "copy"
_SMALLEST_LEARNED = 1.000001  # a learnable λ is above 1


@dataclass(frozen=True)
class Provider:
    """One way to compute an activation.

    Attributes:
        name: key in PROVIDERS.
        build: (input, λ) → a module. Raises RuntimeError, with the reason, where it is unavailable.
        kernel: what computes it: "torch", "inductor", a row of KERNELS, or "automatic" for the choice among them.
        has_hardness: whether λ matters; then it is measured at each.
    """

    name: str
    build: Callable[[Tensor, float], nn.Module]
    kernel: str = "torch"
    has_hardness: bool = False

    def kernel_taken(self, module: nn.Module, x: Tensor) -> str:
        """`kernel`, with the automatic choice made."""
        return choose_kernel(x, module.hardness).name if self.kernel == "automatic" else self.kernel


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
        self.kernel, self.hardness = kernel, nn.Parameter(torch.tensor([hardness]))

    def forward(self, x: Tensor) -> Tensor:
        return hf_lgelu.lambda_gelu(x, self.hardness, kernel=self.kernel)


def _plain(build: Callable[[], nn.Module]) -> Callable[[Tensor, float], nn.Module]:
    return lambda x, hardness: build().to(x.device, x.dtype)


def _learning(build: type[nn.Module]) -> Callable[[Tensor, float], nn.Module]:
    return lambda x, hardness: build(init_hardness=max(hardness, _SMALLEST_LEARNED)).to(x.device)


def _frozen(x: Tensor, hardness: float) -> nn.Module:
    module = _learning(hf_lgelu.LambdaGELU)(x, hardness)
    module.hardness_override.fill_(hardness)
    return module


def _named(kernel: str) -> Provider:
    def build(x: Tensor, hardness: float) -> nn.Module:
        module = NamedKernel(kernel, hardness).to(x.device)
        choose_kernel(x, module.hardness, kernel)
        return module

    return Provider(f"lambda_gelu:{kernel}", build, kernel, True)


def _compiled(build: Callable[[Tensor, float], nn.Module]) -> Callable[[Tensor, float], nn.Module]:
    def compile_it(x: Tensor, hardness: float) -> nn.Module:
        if x.device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise RuntimeError("torch.compile needs a C++ compiler, and there is none on the PATH")
        # Whole graph or an error: a graph that breaks or recompiles too often would be timed as plain torch.
        return torch.compile(build(x, hardness), dynamic=False, fullgraph=True)

    return compile_it


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider(REFERENCE, _plain(nn.GELU)),
        Provider("lambda_gelu", _learning(hf_lgelu.LambdaGELU), "automatic", True),
        Provider("lambda_gelu_frozen", _frozen, "automatic", True),
        *map(_named, KERNELS),
        Provider("lambda_gelu_tanh", _learning(LambdaGELUTanh), "automatic", True),
        Provider("lambda_silu", _learning(hf_lgelu.LambdaSiLU), "automatic", True),
        Provider("gelu_tanh", _plain(lambda: nn.GELU(approximate="tanh"))),
        Provider("relu", _plain(nn.ReLU)),
        Provider("silu", _plain(nn.SiLU)),
        Provider("prelu", _plain(nn.PReLU)),
        Provider("swish_beta", _plain(LearnableSwish)),
        Provider("xielu", lambda x, _: XIELUActivation(dtype=x.dtype).to(x.device)),
        Provider("gelu_compiled", _compiled(_plain(nn.GELU)), "inductor"),
        Provider("lambda_gelu_compiled", _compiled(_learning(hf_lgelu.LambdaGELU)), "inductor", True),
        Provider(FLOOR, lambda x, hardness: Copy()),
    )
}
"""In the order of the table's rows."""
