"""Every call of an activation module in a forward pass: its output, its channel axis, the layer that feeds it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hf_lgelu.models.example_run import Inputs, forward_hooks, run_example
from hf_lgelu.models.input_shapes import channel_axis
from hf_lgelu.models.sites import kind_of

RELU = "relu"


@dataclass(frozen=True)
class GateCall:
    """One call of an activation module.

    `name` is the module's, with "#2", "#3", ... from its second call in a forward pass on. `producers` are the
    modules that made its input, from the nearest backwards as far as each takes one tensor from the next.
    """

    name: str
    module: nn.Module
    kind: str
    output: Tensor
    axis: int
    producers: tuple[nn.Module, ...]


def gate_kind(module: nn.Module) -> str | None:
    """ "relu" for `nn.ReLU`, the kind of a smooth gate (models/sites.py), or None."""
    return RELU if type(module) is nn.ReLU else kind_of(module)


def watch_gates(model: nn.Module, inputs: Inputs, look: Callable[[GateCall], None]) -> None:
    """Run `model` once on `inputs` (no gradients, eval mode) and hand each call of a gate to `look`, in order.

    Raises ValueError if the model has no `nn.ReLU` and no smooth gate that runs.
    """
    names = {module: name for name, module in model.named_modules() if gate_kind(module) is not None}
    calls: Counter[nn.Module] = Counter()
    producer_of = WeakTensorKeyDictionary()  # weak: no activation outlives its use
    source_of: dict[nn.Module, nn.Module | None] = {}

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        data = args[0] if args and isinstance(args[0], Tensor) else None
        producer = None if data is None else producer_of.get(data)
        if module in names and isinstance(output, Tensor) and data is not None:
            calls[module] += 1
            name = names[module] if calls[module] == 1 else f"{names[module]}#{calls[module]}"
            producers = _chain(producer, source_of)
            look(GateCall(name, module, gate_kind(module), output, channel_axis(data, producer), producers))
        # What only passes a tensor on (Identity, dropout in eval mode) did not make it; neither did an in-place gate.
        if isinstance(output, Tensor) and output is not data:
            producer_of[output] = module
            source_of[module] = producer

    leaves = [module for module in model.modules() if module in names or not list(module.children())]
    with forward_hooks(leaves, hook):
        run_example(model, inputs)
    if not calls:
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
