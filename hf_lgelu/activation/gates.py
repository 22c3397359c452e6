"""The family of self-gates f(x; λ) = x·G(λx), with a row for each gate.

G is a smooth step from 0 to 1 with G(−u) = 1 − G(u). At λ = 1 a row is an activation that networks are pretrained with;
for λ → ∞ every row is ReLU. Mish, x·tanh(softplus(x)), is no row: its step is not symmetric, and it is no x·G(λx).
`convert_to_relu` takes Mish networks without training.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SQRT2 = math.sqrt(2.0)
_INV_SQRT2 = math.sqrt(0.5)  # torch's M_SQRT1_2; 1 / √2 is one unit in the last place smaller
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_LOG2_E = 1.0 / math.log(2.0)
_TANH_SLOPE = _SQRT2 * (2.0 / math.sqrt(math.pi)) * 0.5  # √(2/π), in the order in which torch multiplies it
_TANH_CUBE = 0.044715


@dataclass(frozen=True)
class Gate:
    """One G, as plain torch operations on v = `scale`·u, u = λx.

    The tails 1 − G(u) fall faster than any power of 1/u. The tails of arctan do not: its `width` is infinite, and a row
    with infinite width is refused with a ValueError.

    Attributes:
        name: key in GATES, and the activation string of transformers and timm.
        label: the name for people, e.g. λ-GELU.
        formula: the formula of f.
        plain_names: transformers' names of the activation at λ = 1, the usual name first; () if it has none.
        plain_label: the name of this activation for people.
        plain_module: a function that builds this activation, with torch's own class if torch has one.
        width: ∫|H(u) − G(u)|du, so that the paper's E∞(λ) = ∫|H(x) − G(λx)|dx = `width`/λ.
        swap_error: κ = max_u u·(1 − G(u)), so that sup_x |f(x; λ) − ReLU(x)| = κ/λ.
        scale: v/u, multiplied into λ.
        limits: the |v| from which on G is 0 or 1, and its density 0 or a normal number, in float32 and float64.
        step: v → G(u).
        density: v → g(u) = G′(u), even.
        plain_function: u → u·G(u), as torch itself computes it if it does.
        plain_backward: (δ, u, out) → None, with δ·∂(u·G(u))/∂u written into `out`; torch's own function if it has one.
    """

    name: str
    label: str
    formula: str
    plain_names: tuple[str, ...]
    plain_label: str
    plain_module: Callable[[], nn.Module]
    width: float
    swap_error: float
    scale: float
    limits: tuple[float, float]
    step: Callable[[Tensor], Tensor]
    density: Callable[[Tensor], Tensor]
    plain_function: Callable[[Tensor], Tensor]
    plain_backward: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.width) and math.isfinite(self.swap_error)):
            raise ValueError(f"{self.name} has no finite width and swap_error: the tails of its G fall too slowly")

    def limit(self, dtype: torch.dtype) -> float:
        """The |v| at which v is clamped, for this dtype of the arithmetic."""
        return self.limits[1 if dtype == torch.float64 else 0]


def _gaussian_step(v: Tensor) -> Tensor:
    return 0.5 * torch.erf(v) + 0.5


def _gaussian_density(v: Tensor) -> Tensor:
    # torch.exp2 is four times as fast as torch.exp.
    return _INV_SQRT_2PI * torch.exp2(-_LOG2_E * v * v)


def _logistic_density(v: Tensor) -> Tensor:
    tail = torch.sigmoid(-v.abs())  # not σ(1 − σ): 1 − σ has no digits left where σ is near 1
    return tail * (1 - tail)


def _tanh_step(v: Tensor) -> Tensor:
    return 0.5 * torch.tanh(_TANH_SLOPE * (v + _TANH_CUBE * (v * v * v))) + 0.5


def _tanh_density(v: Tensor) -> Tensor:
    square = v * v
    tail = torch.sigmoid(-2 * _TANH_SLOPE * v.abs() * (1 + _TANH_CUBE * square))
    return tail * (1 - tail) * (2 * _TANH_SLOPE * (1 + 3 * _TANH_CUBE * square))


GATES: dict[str, Gate] = {
    gate.name: gate
    for gate in (
        Gate(
            name="lambda_gelu",
            label="λ-GELU",
            formula="x·Φ(λx)",
            plain_names=("gelu", "gelu_python"),  # no family uses the second name for another form
            plain_label="GELU",
            plain_module=nn.GELU,
            width=2 * _INV_SQRT_2PI,
            swap_error=0.16997120747990366,
            scale=_INV_SQRT2,
            limits=(9.0, 26.0),
            step=_gaussian_step,
            density=_gaussian_density,
            plain_function=F.gelu,
            plain_backward=lambda delta, u, out: torch.ops.aten.gelu_backward.grad_input(delta, u, grad_input=out),
        ),
        Gate(
            name="lambda_gelu_tanh",
            label="λ-GELU (tanh)",
            formula="x·½(1 + tanh(√(2/π)·(λx + 0.044715·(λx)³)))",
            plain_names=("gelu_pytorch_tanh", "gelu_new"),
            plain_label="GELU (tanh)",
            plain_module=partial(nn.GELU, approximate="tanh"),
            width=0.79778089557430851,
            swap_error=0.17004075057125405,
            scale=1.0,
            limits=(11.0, 22.0),
            step=_tanh_step,
            density=_tanh_density,
            plain_function=lambda u: F.gelu(u, approximate="tanh"),
            plain_backward=lambda delta, u, out: torch.ops.aten.gelu_backward.grad_input(
                delta, u, approximate="tanh", grad_input=out
            ),
        ),
        Gate(
            name="lambda_silu",
            label="λ-SiLU",
            formula="x·σ(λx)",
            plain_names=("silu", "swish"),
            plain_label="SiLU",
            plain_module=nn.SiLU,
            width=2 * math.log(2.0),
            swap_error=0.27846454276107380,
            scale=1.0,
            limits=(105.0, 750.0),
            step=torch.sigmoid,
            density=_logistic_density,
            plain_function=F.silu,
            plain_backward=lambda delta, u, out: torch.ops.aten.silu_backward.grad_input(delta, u, grad_input=out),
        ),
    )
}
"""λ-GELU is the paper's. `kernels/formulas.h`, `kernels/triton.py` and `kernels/plain.py` hold the fused
forms; a row that is not there is computed by the other kernels."""

DEFAULT_GATE = "lambda_gelu"


def check_gate(name: str) -> Gate:
    """The row of GATES. Raises ValueError with the accepted names for any other name."""
    if name not in GATES:
        raise ValueError(
            f"unknown gate {name!r}; accepted: {', '.join(GATES)}. Mish and other activations that are no x·G(λx) have "
            "none: hf_lgelu.convert_to_relu takes a network with them without training"
        )
    return GATES[name]
