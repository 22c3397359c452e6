"""Tiny float64 networks of every wiring that a refit knows, each with its layers written down by hand.

An `nn.Identity` stands where a target is: it computes nothing, and a hook can read it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from dense_oracle import STRENGTHS, Step, batch_norm_scale, ones, plain_scale
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from hf_lgelu import LambdaGELU


@dataclass(frozen=True)
class Net:
    """A network, its calibration inputs, and its layers in forward order."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    units: int = 96

    def model(self) -> nn.Module:
        """Large random weights, float64, eval mode."""
        torch.manual_seed(3)
        return drawn(self.build())

    def inputs(self, seed: int = 5, units: int | None = None) -> Tensor:
        """Standard normal."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(units or self.units, *self.shape, generator=generator, dtype=torch.float64)


@torch.no_grad()
def drawn(model: nn.Module) -> nn.Module:
    """Weights and statistics that are nowhere 0 or 1."""
    model = model.double().eval()
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.uniform_(0.5, 1.5)
        else:
            fan_in = parameter.shape[0] if parameter.dim() == 2 else parameter[0].numel()
            parameter.normal_(0, 1.2 / fan_in**0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.2, 0.9)
    return model


def mlp() -> nn.Module:
    """Three linear maps, two gates."""
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 8), nn.SiLU(), nn.Linear(8, 4))


class Conv1DBlocks(nn.Module):
    """Two blocks of GPT-2 without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.ModuleList([nn.LayerNorm(5), nn.LayerNorm(5)])
        self.up = nn.ModuleList([Conv1D(12, 5), Conv1D(12, 5)])
        self.act = nn.ModuleList([nn.GELU(approximate="tanh"), nn.GELU()])
        self.down = nn.ModuleList([Conv1D(5, 12), Conv1D(5, 12)])
        self.sum = nn.ModuleList([nn.Identity(), nn.Identity()])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, 5)."""
        for ln, up, act, down, total in zip(self.ln, self.up, self.act, self.down, self.sum, strict=True):
            x = total(x + down(act(up(ln(x)))))
        return self.head(x)


def convolutions() -> nn.Module:
    """Strided, grouped, dilated and depthwise; of one and of two axes; without a bias."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.GELU(),
        nn.Conv2d(6, 4, 3, stride=2, padding=1), nn.SiLU(),
        nn.Conv2d(4, 8, (3, 2), padding=(2, 0), dilation=(2, 1), groups=2), nn.Mish(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GELU(),
        nn.Conv2d(8, 3, 1, bias=False), nn.GELU(), nn.Flatten(),
        nn.Linear(24, 3),
    )  # fmt: skip


class ResidualNet(nn.Module):
    """A stem and a residual block with BatchNorm; the gate after the sum feeds the last convolution."""

    def __init__(self, down: bool) -> None:
        super().__init__()
        stride, width = (2, 5) if down else (1, 4)
        self.stem, self.act0 = nn.Conv2d(2, 4, 3, padding=1), nn.GELU()
        self.conv1, self.bn1 = nn.Conv2d(4, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.act1 = nn.GELU()
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.skip = nn.Sequential(nn.Conv2d(4, 5, 1, 2, bias=False), nn.BatchNorm2d(5)) if down else nn.Identity()
        self.sum, self.act2 = nn.Identity(), nn.GELU()
        self.last = nn.Conv2d(width, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 2, 4, 4)."""
        x = self.act0(self.stem(x))
        inner = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        return self.last(self.act2(self.sum(inner + self.skip(x)))).mean((2, 3))


class GatedBlock(nn.Module):
    """SwiGLU or GEGLU on the residual stream."""

    def __init__(self, act: nn.Module, bias: bool) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(5)
        self.gate, self.up = nn.Linear(5, 11, bias=False), nn.Linear(5, 11, bias=bias)
        self.act, self.down, self.sum = act, nn.Linear(11, 5, bias=bias), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, 5)."""
        inner = self.ln(x)
        return self.sum(x + self.down(self.act(self.gate(inner)) * self.up(inner)))


class ConvNextBlock(nn.Module):
    """Depthwise convolution, channels last, layer scale, and the move back before the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.ln = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.LayerNorm(4)
        self.up, self.act, self.down = nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4)
        self.gamma, self.sum = nn.Parameter(torch.ones(4)), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 4, H, W)."""
        inner = self.ln(self.depthwise(x).permute(0, 2, 3, 1))
        return self.sum(x + (self.gamma * self.down(self.act(self.up(inner)))).permute(0, 3, 1, 2))


class TransposedWeights(nn.Module):
    """Weights used through `.T` in two ways, as Falcon's layers; the other bias-free product has (in, out) weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act1, self.act2 = nn.Linear(6, 7), nn.GELU(), nn.SiLU()
        self.middle, self.last = _Product(8, 7, transposed=True), _Product(8, 4, transposed=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 6)."""
        return self.last(self.act2(self.middle(self.act1(self.up(x)))))


class _Product(nn.Module):
    def __init__(self, *shape: int, transposed: bool) -> None:
        super().__init__()
        self.weight, self.weight_is_transposed = nn.Parameter(torch.empty(shape)), transposed

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in)."""
        return x @ (self.weight.T if self.weight_is_transposed else self.weight)


class OneGate(nn.Module):
    """One module is every gate, as many models have it; the first maps run in parallel on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(6, 8), nn.GELU()
        self.left, self.right, self.last = nn.Linear(8, 7), nn.Linear(8, 5), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 6)."""
        x = self.act(self.up(x))
        return self.last(torch.cat([self.act(self.left(x)), self.act(self.right(x))], dim=-1))


def lambda_gelu_mlp() -> nn.Module:
    """λ-GELU of a hardness each, the second far from the first."""
    return nn.Sequential(nn.Linear(6, 9), LambdaGELU(), nn.Linear(9, 8), LambdaGELU(), nn.Linear(8, 4))


def _bias(*modules: str) -> list[Step]:
    return [Step((name,), name, bias=(f"{name}.bias", ones)) for name in modules]


def _gamma(block: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: model.get_parameter(f"{block}.gamma").detach()


def _channels_last(value: Tensor) -> Tensor:
    return value.permute(0, 2, 3, 1)


def _at_sum(prefix: str, bias: bool = True) -> Step:
    name = f"{prefix}.down"
    return Step((name,), f"{prefix}.sum", bias=(f"{name}.bias", ones) if bias else None)


def _reads(*modules: str, bias: bool = False) -> list[Step]:
    """Maps that read what gated units have written: their own values are the target."""
    return [
        Step((name,), name, bias=(f"{name}.bias", ones) if bias else None, strengths=(1e-5, 1e-4, *STRENGTHS))
        for name in modules
    ]


_BN1, _BN2, _SKIP = batch_norm_scale("bn1"), batch_norm_scale("bn2"), batch_norm_scale("skip.1")
_INNER = Step(("conv1",), "bn1", (_BN1,), ("bn1.bias", ones))
(_READS_LAST,) = _reads("2", bias=True)
_DEPTHWISE = Step(("6",), "6", bias=("6.bias", ones), shifted="4.bias")
_LAST = Step(("last",), "last", bias=("last.bias", ones))

NETS = (
    Net("mlp", mlp, (6,), tuple(_bias("2", "4"))),
    Net("one-gate", OneGate, (6,), tuple(_bias("left", "right", "last"))),
    Net("lambda-gelu", lambda_gelu_mlp, (6,), tuple(_bias("2", "4"))),
    Net(
        "plain-norm",
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 7), nn.BatchNorm1d(7, affine=False), nn.GELU(), nn.Linear(7, 3)
        ),
        (6,),
        (Step(("2",), "3", (plain_scale("3"),), ("2.bias", plain_scale("3"))), *_bias("5")),
    ),
    Net("transposed", TransposedWeights, (6,), (Step(("middle",), "middle"), Step(("last",), "last"))),
    Net(
        "conv1d", Conv1DBlocks, (3, 5),
        tuple(Step((f"down.{i}",), f"sum.{i}", bias=(f"down.{i}.bias", ones)) for i in range(2)),
    ),
    Net("convolutions", convolutions, (2, 8, 6), (*_bias("2", "4"), _DEPTHWISE, Step(("8",), "8"), *_bias("11"))),
    Net(
        "residual", lambda: ResidualNet(down=False), (2, 4, 4),
        (_INNER, Step(("conv2",), "sum", (_BN2,), ("bn2.bias", ones)), _LAST),
    ),
    Net(
        "downsampling", lambda: ResidualNet(down=True), (2, 4, 4),
        (_INNER, Step(("conv2", "skip.0"), "sum", (_BN2, _SKIP), ("bn2.bias", ones)), _LAST),
    ),
    Net(
        "swiglu", lambda: nn.Sequential(*(GatedBlock(nn.SiLU(), bias=False) for _ in range(2)), nn.Linear(5, 3)),
        (3, 5), (_at_sum("0", bias=False), *_reads("1.gate", "1.up"), _at_sum("1", bias=False), _READS_LAST),
    ),
    Net(
        "geglu", lambda: nn.Sequential(*(GatedBlock(nn.GELU(), bias=True) for _ in range(2)), nn.Linear(5, 3)),
        (3, 5), (_at_sum("0"), *_reads("1.gate"), *_reads("1.up", bias=True), _at_sum("1"), _READS_LAST),
    ),
    Net(
        "convnext", lambda: nn.Sequential(ConvNextBlock(), ConvNextBlock(), nn.Flatten(), nn.Linear(36, 3)),
        (4, 3, 3),
        tuple(
            Step((f"{i}.down",), f"{i}.sum", (_gamma(i),), (f"{i}.down.bias", _gamma(i)), _channels_last)
            for i in range(2)
        ),
    ),
)  # fmt: skip
BY_NAME = {net.name: net for net in NETS}


class Encoder(nn.Module):
    """States of tokens, whose mean is the embedding; its last map shares the token embeddings."""

    def __init__(self, size=6):
        super().__init__()
        self.words, self.places = nn.Embedding(20, size), nn.Embedding(9, size)
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 16), nn.Linear(16, size)
        self.score = nn.Linear(size, 20, bias=False)
        self.score.weight = self.words.weight

    def forward(self, input_ids, attention_mask):
        states = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        return {"last_hidden_state": self.down(F.gelu(self.up(self.norm(states))))}
