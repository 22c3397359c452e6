"""Which hidden units can be removed without touching anything but the layer before and the layer after."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_lgelu.analysis.pruning.zeros import GateCall, watch_gates
from hf_lgelu.extras import require
from hf_lgelu.models.comparison import floating_outputs
from hf_lgelu.models.example_run import (
    Inputs,
    evaluation_mode,
    forward_hooks,
    forward_pre_hooks,
    placed,
    run_example,
)
from hf_lgelu.models.sites import lambda_gelu_modules

_LAYERS = (nn.Linear, Conv1D, nn.modules.conv._ConvNd)
# These act on each channel alone in eval mode, so that a unit may be removed in front of one.
_BY_CHANNEL = (nn.modules.batchnorm._NormBase,)


@dataclass(frozen=True)
class HiddenLayer:
    """A layer whose output units reach the next layer, `into`, through an activation, and nothing else.

    `gates` are the names of the activation's calls (GateCall.name), `norms` those of what normalizes each unit alone,
    before the activation or behind it. `partners` are layers whose units are multiplied by what the activation gives,
    each by its own (gated linear units, Shazeer, arXiv:2002.05202), and go with them.
    """

    name: str
    gates: tuple[str, ...]
    norms: tuple[str, ...]
    partners: tuple[str, ...]
    into: str
    kind: str
    units: int


class Pruner:
    """torch-pruning's dependency graph of one model; the model itself is changed by `remove`."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        """Raises ImportError that names the extra without torch-pruning."""
        self.model = model
        self._pruning = require("torch_pruning", "prune")
        self._conv1d = _conv1d_pruner(self._pruning)
        self._names = {module: name for name, module in model.named_modules()}
        self._holders = Counter(id(tensor) for module in self._names for tensor in module._parameters.values())
        with evaluation_mode(model), _all_gradients(model), _no_cache(model), torch.enable_grad():
            self._graph = self._pruning.DependencyGraph().build_dependency(
                model,
                example_inputs=placed(inputs, model),
                output_transform=_sum_of_outputs,
                customized_pruners={Conv1D: self._conv1d},
                ignored_params=[module.raw_hardness for _, module in lambda_gelu_modules(model)],
                verbose=False,
            )
        self.layers = self._hidden_layers(inputs)

    def remove(self, layer: HiddenLayer, units: Sequence[int]) -> None:
        """Remove the units with these indices from `layer`."""
        with _all_gradients(self.model):
            self._group(self.model.get_submodule(layer.name), list(units)).prune()

    def _hidden_layers(self, inputs: Inputs) -> list[HiddenLayer]:
        calls: dict[nn.Module, list[GateCall]] = {}

        def look(call: GateCall) -> None:
            layer = _layer_before(call)
            if layer is not None:
                calls.setdefault(layer, []).append(call)

        watch_gates(self.model, inputs, look)
        found = [self._hidden_layer(layer, of_layer) for layer, of_layer in calls.items()]
        layers = [layer for layer in found if layer is not None]
        others = _no_plain_products(self.model, [layer for layer in layers if layer.partners], inputs)
        return [layer for layer in layers if layer.name not in others]

    def _hidden_layer(self, layer: nn.Module, calls: Sequence[GateCall]) -> HiddenLayer | None:
        """None where the units are used by more than the layer after, or are not the gate's own and its partners'."""
        if len({call.kind for call in calls}) != 1 or any(_has_several_hardnesses(call.module) for call in calls):
            return None
        group = self._group(layer, [0])
        consumers: list[nn.Module] = []
        partners: list[nn.Module] = []
        norms: list[nn.Module] = []
        for dependency, _ in group:
            target = dependency.target.module
            if target is layer or not _has_parameters(target):
                continue
            if isinstance(target, _BY_CHANNEL):
                norms.append(target)
                continue
            if not isinstance(target, _LAYERS) or "weight" not in target._parameters:  # it is computed from others
                return None
            takes_them = self._graph.is_in_channel_pruning_fn(dependency.handler)
            (consumers if takes_them else partners).append(target)
        if len(consumers) != 1 or not self._graph.check_pruning_group(self._group(layer, [0])):
            return None
        # torch-pruning takes the same channels out of every group, not those that the units feed.
        around = (*partners, *consumers)
        if any(getattr(each, "groups", 1) != 1 for each in around) or self._is_tied(layer, *norms, *around):
            return None
        axis = calls[0].axis
        if axis is None or self.units(self._names[layer]) != calls[0].output.shape[axis]:
            return None
        return HiddenLayer(
            self._names[layer],
            gates=tuple(call.name for call in calls),
            norms=tuple(self._names[norm] for norm in norms),
            partners=tuple(self._names[partner] for partner in partners),
            into=self._names[consumers[0]],
            kind=calls[0].kind,
            units=calls[0].output.shape[axis],
        )

    def _is_tied(self, *layers: nn.Module) -> bool:
        """Whether a parameter of one of these is another module's too, which would go on with the whole of it."""
        return any(self._holders[id(tensor)] > 1 for layer in layers for tensor in layer.parameters(recurse=False))

    def units(self, name: str) -> int:
        """Units that the layer has now."""
        layer = self.model.get_submodule(name)
        return layer.nf if isinstance(layer, Conv1D) else layer.weight.shape[0]

    def _group(self, layer: nn.Module, units: list[int]) -> Any:
        if isinstance(layer, Conv1D):
            prune = self._conv1d.prune_out_channels
        elif isinstance(layer, nn.Linear):
            prune = self._pruning.prune_linear_out_channels
        else:
            prune = self._pruning.prune_conv_out_channels
        return self._graph.get_pruning_group(layer, prune, idxs=units)


def _no_plain_products(model: nn.Module, layers: Sequence[HiddenLayer], inputs: Inputs) -> set[str]:
    """The names of those of `layers` whose `into` takes anything but the activation times its partners.

    A sum, a second activation or a constant in between would be left behind where the units are taken out.
    """
    latest: dict[nn.Module, Tensor] = {}
    others: set[str] = set()
    into: dict[nn.Module, list[HiddenLayer]] = {}
    for layer in layers:
        into.setdefault(model.get_submodule(layer.into), []).append(layer)
    factors = {
        # One module may be the activation of many layers: "act", "act#2", ...
        layer.name: [model.get_submodule(name.partition("#")[0]) for name in (layer.gates[0], *layer.partners)]
        for layer in layers
    }

    def keep(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        latest[module] = output.clone()  # may be multiplied in place

    def compare(module: nn.Module, args: tuple[Any, ...]) -> None:
        for layer in into[module]:
            of_layer = [latest.pop(factor, None) for factor in factors[layer.name]]
            if not args or any(factor is None for factor in of_layer) or not _is_product(args[0], of_layer):
                others.add(layer.name)

    if layers:
        watched = {module for of_layer in factors.values() for module in of_layer}
        with forward_hooks(watched, keep), forward_pre_hooks(into, compare):
            run_example(model, inputs)
    return others


def _is_product(values: Tensor, factors: Sequence[Tensor]) -> bool:
    try:
        product = math.prod(factors[1:], start=factors[0])
    except RuntimeError:  # of shapes that do not broadcast
        return False
    return values.shape == product.shape and torch.equal(values, product.to(values.dtype))


def outputs_without(
    model: nn.Module, layers: Sequence[HiddenLayer], units: Mapping[str, Sequence[int]], inputs: Inputs
) -> Any:
    """What the model gives with these units of each layer at 0, by no other means than its own forward."""
    of_gate = {gate: units[layer.name] for layer in layers if units.get(layer.name) for gate in layer.gates}
    of_norm = {
        model.get_submodule(norm): units[layer.name]
        for layer in layers
        if units.get(layer.name)
        for norm in layer.norms
    }

    def silence(call: GateCall) -> Tensor | None:
        if call.axis is None or call.name not in of_gate:
            return None
        return _at_zero(call.output, call.axis, of_gate[call.name])

    with forward_hooks(of_norm, lambda norm, args, output: _at_zero(output, 1, of_norm[norm])):
        return watch_gates(model, inputs, silence)


def _at_zero(values: Tensor, axis: int, units: Sequence[int]) -> Tensor:
    return values.index_fill(axis, torch.tensor(units, device=values.device), 0.0)


def _layer_before(call: GateCall) -> nn.Module | None:
    for producer in call.producers:
        if isinstance(producer, _LAYERS):
            # A grouped convolution's channels belong together; torch-pruning would take a whole group of them.
            return producer if getattr(producer, "groups", 1) == 1 else None
        if not isinstance(producer, _BY_CHANNEL):
            return None
    return None


def _has_several_hardnesses(gate: nn.Module) -> bool:
    raw = getattr(gate, "raw_hardness", None)
    return raw is not None and raw.numel() > 1


def _has_parameters(target: Any) -> bool:
    return isinstance(target, nn.Parameter) or (
        isinstance(target, nn.Module) and next(target.parameters(), None) is not None
    )


@contextmanager
def _all_gradients(model: nn.Module) -> Iterator[None]:
    """Frozen parameters take part in the trace, and are frozen again after it."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())  # integers have none
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)


@contextmanager
def _no_cache(model: nn.Module) -> Iterator[None]:
    """A decoder's cache of keys and values starts with an empty tensor, at which torch-pruning stumbles."""
    config = getattr(model, "config", None)
    if config is None or not getattr(config, "use_cache", False):
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = True


def _sum_of_outputs(output: Any) -> Tensor:
    return sum(tensor.sum() for tensor in floating_outputs(output))


def _conv1d_pruner(pruning: Any) -> Any:
    """How torch-pruning takes units from transformers' Conv1D, which it does not know: the weight is (in, out)."""

    class Conv1DPruner(pruning.BasePruningFunc):
        def prune_out_channels(self, layer: Conv1D, idxs: Sequence[int]) -> Conv1D:
            keep = sorted(set(range(layer.nf)) - set(idxs))
            layer.nf = len(keep)
            layer.weight = self._prune_parameter_and_grad(layer.weight, keep, 1)
            layer.bias = self._prune_parameter_and_grad(layer.bias, keep, 0)
            return layer

        def prune_in_channels(self, layer: Conv1D, idxs: Sequence[int]) -> Conv1D:
            keep = sorted(set(range(layer.nx)) - set(idxs))
            layer.nx = len(keep)
            layer.weight = self._prune_parameter_and_grad(layer.weight, keep, 0)
            return layer

        def get_out_channels(self, layer: Conv1D) -> int:
            return layer.nf

        def get_in_channels(self, layer: Conv1D) -> int:
            return layer.nx

    return Conv1DPruner()
