"""How often each unit's activation is zero on given data: APoZ, the average percentage of zeros.

Network Trimming (Hu, Peng, Tai, Tang, 2016, arXiv:1607.03250), equation 1: the share of exact zeros among a unit's
outputs over rows and positions. It says what a network does on these data, and promises no speed-up.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_lgelu.analysis.pruning.gate_calls import GateCall, watch_gates
from hf_lgelu.models.example_run import Inputs


@dataclass(frozen=True)
class GateZeros:
    """Counts at one activation, for each of its U units (channels); tensors of shape (U,), on the CPU.

    Args:
        kind: "relu", or the kind of smooth gate.
        values: outputs seen of each unit: rows × positions. Padded positions count as well.
        zeros: of these exactly 0, int64.
        off: of these at most 0, int64. A gate's output is ≤ 0 exactly where its input is, for ReLU, GELU and λ-GELU
            alike: for ReLU this is `zeros`, and for a smooth gate the zeros that ReLU in its place would give.
        near_zero: of these within ± `threshold`, int64.
        threshold: in units of the activations.
        absolute_sum: sum of |a|, float64.
    """

    kind: str
    values: int
    zeros: Tensor
    off: Tensor
    near_zero: Tensor
    threshold: float
    absolute_sum: Tensor

    @property
    def apoz(self) -> Tensor:
        """(U,) share of exact zeros, 0 to 1, float64."""
        return self.zeros.double() / self.values

    @property
    def off_fraction(self) -> Tensor:
        """(U,) share of outputs ≤ 0, float64: the APoZ by which smooth gates and ReLU can be compared."""
        return self.off.double() / self.values

    @property
    def near_zero_fraction(self) -> Tensor:
        """(U,) share of outputs with |a| ≤ `threshold`, float64."""
        return self.near_zero.double() / self.values

    @property
    def mean_absolute(self) -> Tensor:
        """(U,) mean of |a|, float64."""
        return self.absolute_sum / self.values

    @property
    def dead_units(self) -> list[int]:
        """Indices of the units that never fire: every output exactly 0."""
        return (self.zeros == self.values).nonzero().flatten().tolist()


def measure_zeros(model: nn.Module, batches: Iterable[Inputs], *, threshold: float = 1e-3) -> dict[str, GateZeros]:
    """{activation: counts} over all batches, in the order in which the activations run.

    An activation is an `nn.ReLU` or a smooth gate in the module tree; one that runs several times in a forward pass
    is counted by call ("relu", "relu#2", ...). Units lie along axis 1 behind a convolution or batch normalization,
    along the last behind a linear layer. Nothing but counts is kept. In eval mode.

    Args:
        batches: what the model is called with, e.g. a DataLoader of mappings.
        threshold: of `near_zero`, at least 0.

    Raises ValueError for a negative threshold, for no batch, for a model without an activation module, and for an
    activation whose units are not the same number in every batch.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold must be at least 0, got {threshold}")
    counts: dict[str, GateZeros] = {}

    def add(call: GateCall) -> None:
        new = _count(call, threshold)
        counts[call.name] = _sum(call.name, counts[call.name], new) if call.name in counts else new

    for batch in batches:
        watch_gates(model, batch, add)
    if not counts:
        raise ValueError("batches is empty; give at least one batch of rows")
    return counts


def _count(call: GateCall, threshold: float) -> GateZeros:
    units = call.output.shape[call.axis]
    output = call.output.detach().movedim(call.axis, -1).reshape(-1, units)
    absolute = output.abs()
    return GateZeros(
        kind=call.kind,
        values=output.shape[0],
        zeros=(output == 0).sum(0, dtype=torch.int64).cpu(),
        off=(output <= 0).sum(0, dtype=torch.int64).cpu(),
        near_zero=(absolute <= threshold).sum(0, dtype=torch.int64).cpu(),
        threshold=threshold,
        absolute_sum=absolute.sum(0, dtype=torch.float64).cpu(),
    )


def _sum(name: str, first: GateZeros, second: GateZeros) -> GateZeros:
    if first.zeros.shape != second.zeros.shape:
        raise ValueError(
            f"{name} has {len(second.zeros)} units in one batch and {len(first.zeros)} in another: its units do not "
            "lie along the channel axis of its input"
        )
    return GateZeros(
        kind=first.kind,
        values=first.values + second.values,
        zeros=first.zeros + second.zeros,
        off=first.off + second.off,
        near_zero=first.near_zero + second.near_zero,
        threshold=first.threshold,
        absolute_sum=first.absolute_sum + second.absolute_sum,
    )
