"""Targets of hardness that fit each layer, from the pre-activations that reach its gate."""

from typing import Any

import torch
from torch import Tensor, nn

from hf_lgelu.activation.gates import GATES, Gate
from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.networks.batches import Batch, read_batches
from hf_lgelu.networks.run import forward_hooks, run_example
from hf_lgelu.networks.sites import require_lambda_gelu

_TARGETS = (1.05, 2.0**40)
_HALVINGS = 40
_EDGES = 2.0 ** torch.arange(-160, 161, dtype=torch.float64).div(8)  # of |z|: eight an octave
_MIDDLES = torch.cat([torch.zeros(1, dtype=torch.float64), _EDGES * 2.0 ** (1 / 16)])  # of the bins that they bound


class _Seen:
    """Of the pre-activations z of a gate: how many there are, Σ ReLU(z)², a histogram of |z| for each λ."""

    def __init__(self, module: LambdaGate) -> None:
        self.gate = GATES[module.gate]
        self.shape: tuple[int, ...] = tuple(module.raw_hardness.shape)
        self.count, self.squares = 0, 0.0
        self.histogram = torch.zeros(torch.Size(self.shape).numel(), len(_MIDDLES), dtype=torch.int64)

    def add(self, z: Tensor, counted: Tensor | None) -> None:
        """Where `counted` is a mask of all axes but the last, of the rows in it."""
        if counted is not None and len(self.shape) == 1:
            z = z[counted]
        z = z.detach().double().cpu()
        self.count += z.numel()
        self.squares += z.relu().square().sum().item()
        bins = torch.bucketize(z.abs(), _EDGES)
        if len(self.histogram) > 1:
            bins = bins + len(_MIDDLES) * torch.arange(len(self.histogram)).view(self.shape)
        counts = torch.bincount(bins.flatten(), minlength=self.histogram.numel())
        self.histogram += counts.view_as(self.histogram)


@torch.no_grad()
def layer_targets(model: nn.Module, data: Any, *, tolerance: float = 0.01) -> dict[str, float | Tensor]:
    """{module name: λ} at which ReLU in the place of a gate moves its output by about `tolerance` of its rms.

    With ρ² = E[ReLU(z)²] over the gate, the target is the smallest λ with

        E[z²·(H(z) − G(λz))²] ≤ (tolerance·ρ)².

    The mean is taken over a histogram of the z that are seen. Where a gate has a λ per channel or neuron, each gets its
    own, by its own z and the ρ of the whole gate.
    Positions that a batch's attention mask calls padding do not count, where z is of its shape (sequences, tokens).
    `model` stays as it is. `anneal_hardness(model, progress, target_hardness=...)`, `is_hardened(model, ...)` and
    `HardeningConfig(target_hardness=...)` take what this returns.

    Args:
        model: has λ-gates.
        data: like what the model is for, as `convert_to_relu` takes it: a tensor, a mapping of tensors, an iterable of
            batches or a dataset. Labels are left out.
        tolerance: relative root mean square of the swap's error, in (0, 1).

    Returns:
        A number for a gate with one λ; for others a float64 tensor of the shape of s. At least 1.05.

    Example:
        >>> import torch
        >>> from hf_lgelu import LambdaGELU
        >>> from lgelu_lab.studies.layer_targets import layer_targets
        >>> model = torch.nn.Sequential(torch.nn.Identity(), LambdaGELU())
        >>> z = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
        >>> {name: round(target) for name, target in layer_targets(model, z).items()}
        {'1': 8}
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be a number in (0, 1), got {tolerance!r}")
    names: dict[LambdaGate, str] = {module: name for name, module in require_lambda_gelu(model)}
    seen = {module: _Seen(module) for module in names}
    batch: Batch

    def note(module: Any, args: tuple[Any, ...], output: Any) -> None:
        seen[module].add(args[0], batch.counted(args[0], names[module]))

    for batch in read_batches(data, model=model):
        with forward_hooks(seen, note):  # not while the reader tries what the model takes
            run_example(model, batch.inputs)
    found: dict[str, float | Tensor] = {}
    for module, name in names.items():
        z = seen[module]
        mean_square = z.squares / z.count if z.count else 0.0
        if not 0 < mean_square < float("inf"):
            raise ValueError(f"{name or 'the gate'} gets no finite inputs above 0; give data that runs the whole model")
        targets = _smallest_hardness(z.gate, z.histogram, tolerance**2 * mean_square)
        found[name] = targets.item() if len(targets) == 1 else targets.view(z.shape)
    return found


def _smallest_hardness(gate: Gate, histogram: Tensor, allowed: float) -> Tensor:
    """Of each row the smallest λ with which the mean of z²(H(z) − G(λz))², which falls in λ, is at most `allowed`."""
    present = histogram.any(dim=0)
    z, shares = _MIDDLES[present], histogram[:, present] / histogram.sum(dim=1, keepdim=True)
    low, high = (torch.full((len(shares), 1), end, dtype=torch.float64).log() for end in _TARGETS)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        error = (shares * (z * gate.step(-gate.scale * middle.exp() * z)).square()).sum(dim=1, keepdim=True)
        is_enough = error <= allowed
        low, high = torch.where(is_enough, low, middle), torch.where(is_enough, middle, high)
    return high.exp().flatten()
