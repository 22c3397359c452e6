"""How often each unit's activation is zero on given data: APoZ, the average percentage of zeros.

Network Trimming (Hu, Peng, Tai, Tang, 2016, arXiv:1607.03250), equation 1: the share of exact zeros among a unit's
outputs over rows and positions. It says what a network does on these data, and promises no speed-up.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.weak import WeakTensorKeyDictionary

from hf_lgelu.models.channels import ChannelAxes, axis_not_told
from hf_lgelu.models.example_run import Inputs, forward_hooks, keeping_buffers, require_plain, run_example
from hf_lgelu.models.sites import checked_module, is_activation, kind_of

RELU = "relu"


@dataclass(frozen=True)
class GateCall:
    """One call of an activation module.

    `name` is the module's, with "#2", "#3", ... from its second call in a forward pass on. `axis` counts its units,
    from 0; None where that is not known. `producers` are the modules that made its input, from the nearest backwards
    as far as each takes one tensor from the next.
    """

    name: str
    module: nn.Module
    kind: str
    output: Tensor
    axis: int | None
    producers: tuple[nn.Module, ...]


def gate_kind(module: nn.Module) -> str | None:
    """ "relu" for `nn.ReLU`, the kind of a smooth gate (models/sites.py), or None."""
    return RELU if type(module) is nn.ReLU else kind_of(module)


def watch_gates(model: nn.Module, inputs: Inputs, look: Callable[[GateCall], Tensor | None]) -> Any:
    """Run `model` once on `inputs` (no gradients, eval mode) and hand each call of a gate to `look`, in order.

    What `look` gives, unless that is None, takes the place of the gate's output. Returns the model's output.

    Raises ValueError if the model has no `nn.ReLU` and no smooth gate that runs.
    """
    names = {module: name for name, module in model.named_modules() if gate_kind(module) is not None}
    calls: Counter[nn.Module] = Counter()
    producer_of = WeakTensorKeyDictionary()  # weak: no activation outlives its use
    source_of: dict[nn.Module, nn.Module | None] = {}
    axes = ChannelAxes(model)

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
        taken = None
        data = args[0] if args and isinstance(args[0], Tensor) else None
        producer = None if data is None else producer_of.get(data)
        kind = gate_kind(module)
        if kind is not None and isinstance(output, Tensor) and data is not None:
            calls[module] += 1
            name = names[module] if calls[module] == 1 else f"{names[module]}#{calls[module]}"
            producers = _chain(producer, source_of)
            taken = look(GateCall(name, module, kind, output, axes.of(data), producers))
            output = output if taken is None else taken
        # What only passes a tensor on (Identity, dropout in eval mode) did not make it; neither did an in-place gate.
        if isinstance(output, Tensor) and output is not data:
            producer_of[output] = module
            source_of[module] = producer
        return taken

    leaves = [module for module in model.modules() if module in names or not list(module.children())]
    with forward_hooks(leaves, hook), axes.watching():
        given = run_example(model, inputs)
    if not calls:
        _refuse_other_activations(model)
    return given


def _refuse_other_activations(model: nn.Module) -> NoReturn:
    others = Counter(
        type(module).__name__ for module in model.modules() if is_activation(module) and gate_kind(module) is None
    )
    if others:
        raise ValueError(
            f"no nn.ReLU and no smooth gate (GELU, SiLU, Mish, λ-gate) runs as a module in {type(model).__name__}, and "
            f"no others are looked at: it has {', '.join(f'{count} {name}' for name, count in others.items())}"
        )
    raise ValueError(
        f"no activation module runs in {type(model).__name__}: neither nn.ReLU nor a smooth gate. Activations that "
        "are called as functions cannot be seen; make them modules"
    )


def _chain(module: nn.Module | None, source_of: dict[nn.Module, nn.Module | None]) -> tuple[nn.Module, ...]:
    chain: list[nn.Module] = []
    while module is not None and module not in chain:
        chain.append(module)
        module = source_of.get(module)
    return tuple(chain)


@dataclass(frozen=True)
class GateZeros:
    """Counts at one activation, for each of its U units (channels); tensors of shape (U,), on the CPU.

    Args:
        kind: "relu", or the kind of smooth gate.
        values: outputs seen of each unit: rows × positions. Padded positions count as well. 0 where the activation ran
            on no row, as in an expert that none was sent to: the shares are NaN then, and no unit is dead.
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
        return (self.zeros == self.values).nonzero().flatten().tolist() if self.values else []


@keeping_buffers
def measure_zeros(
    model: nn.Module, data: Inputs | Iterable[Inputs], *, threshold: float = 1e-3
) -> dict[str, GateZeros]:
    """{activation: counts} over all batches, in the order in which the activations run. `model` stays as it is.

    An activation is an `nn.ReLU` or a smooth gate in the module tree; one that runs several times in a forward pass
    is counted by call ("relu", "relu#2", ...). Units lie along axis 1 behind a convolution or batch normalization,
    along the last behind a linear layer, and are followed from there through sums, slices and transposes. Behind
    anything else they lie along axis 1 of four and more, and along the last of fewer. Nothing but counts is kept. In
    eval mode.

    Args:
        model: any module tree.
        data: batches of what the model is called with, e.g. a DataLoader of mappings; or one batch, a tensor or
            mapping.
        threshold: of `near_zero`, at least 0.

    Raises:
        TypeError: `data` holds no batches.
        ValueError: a negative threshold; no rows, or NaN or infinity in them; a model without an activation module, or
            one that gives NaN; an activation whose units are not the same number in every batch, or with three axes
            of which it is not known in a model with 1-D convolutions.

    Example:
        >>> import torch
        >>> from hf_lgelu import measure_zeros
        >>> zeros = measure_zeros(torch.nn.Sequential(torch.nn.ReLU()), torch.tensor([[-1.0, 2.0], [-3.0, -4.0]]))
        >>> zeros["0"].apoz.tolist(), zeros["0"].dead_units
        ([1.0, 0.5], [0])
    """
    checked_module(model)
    if not threshold >= 0:
        raise ValueError(f"threshold must be at least 0, got {threshold}")
    return count_zeros(model, data, threshold=threshold)


def count_zeros(
    model: nn.Module, data: Inputs | Iterable[Inputs], *, threshold: float = 1e-3, names: Collection[str] | None = None
) -> dict[str, GateZeros]:
    """What `measure_zeros` gives, of the calls of these `names` alone (`GateCall.name`)."""
    counts: dict[str, GateZeros] = {}

    def add(call: GateCall) -> None:
        if names is not None and call.name not in names:
            return
        new = _count(call, threshold)
        counts[call.name] = _sum(call.name, counts[call.name], new) if call.name in counts else new

    for batch in checked_batches(data):
        watch_gates(model, batch, add)
    return counts


def checked_batches(data: Inputs | Iterable[Inputs], *, twice: bool = False) -> Iterator[Inputs]:
    """The batches of `data`, each with rows that are finite numbers; at least one.

    Raises:
        TypeError: `data` cannot be read in batches; or not a second time, which `twice` asks for.
        ValueError: no batch, no rows in one, or NaN or infinity in them.
    """
    one = isinstance(data, Tensor | Mapping)
    if not one and (not isinstance(data, Iterable) or isinstance(data, str | Dataset)):
        raise TypeError(
            f"data must be batches, such as a DataLoader or a list, or one tensor or mapping; got {type(data).__name__}"
        )
    if twice and not one and iter(data) is data:
        raise TypeError(
            f"data must be a list of batches or a DataLoader, which can be read twice, got {type(data).__name__}"
        )
    number = -1
    for number, batch in enumerate([data] if one else data):
        _require_rows(batch, number)
        yield batch
    if number < 0:
        raise ValueError("data is empty; give at least one batch of rows")


def _require_rows(batch: Inputs, number: int) -> None:
    values = batch.values() if isinstance(batch, Mapping) else [batch] if isinstance(batch, Tensor) else batch
    for tensor in values:
        if not isinstance(tensor, Tensor):
            continue
        require_plain(tensor)
        if not tensor.numel():
            raise ValueError(f"batch {number} of data has no rows: a tensor of shape {tuple(tensor.shape)}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"batch {number} of data holds NaN or infinity; give finite numbers")


def _count(call: GateCall, threshold: float) -> GateZeros:
    if call.axis is None:
        raise ValueError(
            f"{axis_not_told(call.name, tuple(call.output.shape), 'units')}. A normalization layer right before it "
            "would tell; or measure a part of the model without it"
        )
    units = call.output.shape[call.axis]
    output = call.output.detach().movedim(call.axis, -1).reshape(-1, units)
    if output.isnan().any():
        raise ValueError(f"{call.name} gives NaN on these data; look at the model's weights")
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
