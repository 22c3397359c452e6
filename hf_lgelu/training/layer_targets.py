"""Targets of hardness that fit each layer, from the pre-activations that reach its gate."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_lgelu.activation.gates import GATES
from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.example_run import Inputs, forward_hooks, run_example
from hf_lgelu.models.sites import LAMBDA_GATE_CLASSES, require_lambda_gelu

_SMALLEST_TARGET = 1.05
_NEAR = 0.02  # the share of pre-activations that is near 0
_EDGES = 2.0 ** torch.arange(-160, 161, dtype=torch.float64).div(8)  # of |z|: eight an octave


class _Seen:
    """Of the pre-activations z of one hardness: how many there are, Σ ReLU(z)², and a histogram of |z|."""

    def __init__(self, gate: str) -> None:
        self.gate = gate
        self.count, self.squares = 0, 0.0
        self.histogram = torch.zeros(len(_EDGES) + 1, dtype=torch.int64)

    def add(self, z: Tensor) -> None:
        z = z.detach().flatten().double().cpu()
        self.count += z.numel()
        self.squares += z.relu().square().sum().item()
        self.histogram += torch.bincount(torch.bucketize(z.abs(), _EDGES), minlength=len(_EDGES) + 1)

    def density_at_zero(self) -> float:
        """p(0): the share of z within ±h over 2h, for the smallest h that holds `_NEAR` of them."""
        near = self.histogram.cumsum(0)
        edge = int((near[:-1] < _NEAR * self.count).sum().clamp(max=len(_EDGES) - 1))
        return near[edge].item() / self.count / (2 * _EDGES[edge].item())


@torch.no_grad()
def layer_targets(model: nn.Module, data: Inputs | Iterable[Inputs], *, tolerance: float = 0.01) -> dict[str, float]:
    """{module name: λ} at which ReLU in the place of a gate moves its output by about `tolerance` of its rms.

    For pre-activations z with density p, the swap's error z·(H(z) − G(λz)) lives within a few 1/λ of 0, where p is
    p(0). So its mean is E|z(H(z) − G(λz))| ≈ p(0)·c₁/λ² with c₁ = ∫|u|·|H(u) − G(u)|du, ½ for λ-GELU, and its
    square's mean ≈ p(0)·c₂/λ³ with c₂ = ∫u²·(H(u) − G(u))²du. With ρ² = E[ReLU(z)²] the target is

        λ = (p(0)·c₂ / (tolerance·ρ)²)^(1/3).

    `model` stays as it is. Where several sites share a λ, it is that of all their pre-activations together; a gate
    with a λ per channel or neuron gets one target. `anneal_hardness(model, progress, target_hardness=...)` and
    `HardeningCallback(target_hardness=...)` take what this returns.

    Args:
        model: has λ-gates.
        data: one batch, or an iterable of batches, like those that the model is for.
        tolerance: relative root mean square of the swap's error, in (0, 1).

    Raises:
        ValueError: no λ-gate, a tolerance out of its range, data that is empty or never reaches a gate, or
            pre-activations that are not finite or never above 0.

    Example:
        >>> import torch
        >>> from hf_lgelu import LambdaGELU, layer_targets
        >>> model = torch.nn.Sequential(torch.nn.Identity(), LambdaGELU())
        >>> z = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
        >>> {name: round(target) for name, target in layer_targets(model, z).items()}
        {'1': 8}
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be a number in (0, 1), got {tolerance!r}")
    owners = require_lambda_gelu(model)
    seen = {id(module): _Seen(module.gate) for _, module in owners}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        owner = module if isinstance(module, LambdaGate) else module.owner
        seen[id(owner)].add(args[0])

    batches = [data] if isinstance(data, Tensor | Mapping) else data
    with forward_hooks([module for module in model.modules() if isinstance(module, LAMBDA_GATE_CLASSES)], note):
        for batch in batches:
            run_example(model, batch)
    return {name: _target(name, seen[id(module)], tolerance) for name, module in owners}


def _target(name: str, seen: _Seen, tolerance: float) -> float:
    if seen.count == 0:
        raise ValueError(f"the data never reaches {name or 'the gate'}; give data that runs the whole model")
    mean_square = seen.squares / seen.count
    if not 0 < mean_square < float("inf"):
        raise ValueError(f"the pre-activations of {name or 'the gate'} are never above 0, or not finite")
    cubed = seen.density_at_zero() * GATES[seen.gate].square_moment / (tolerance**2 * mean_square)
    return max(_SMALLEST_TARGET, cubed ** (1 / 3))
