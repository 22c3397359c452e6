"""Parameters around gates multiplied by factors, so that each gate gets its input scaled and the outputs stay."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_lgelu.export.absorption.neighbours import NotAbsorbableError, layer_after, layers_before
from hf_lgelu.models.dataflow import AffineOperation, DataFlow, describe, shape_of
from hf_lgelu.models.example_run import Inputs
from hf_lgelu.models.outputs import agree, outputs_of
from hf_lgelu.models.sites import ActivationSite


@dataclass(frozen=True)
class ScalingPlan:
    """The factors that scale the inputs of sites, and divide their outputs again in the layers behind them.

    `factors` by parameter name, float64 and broadcastable to the parameter; by site index the weights of the layers
    `before` and `after`, and why there is no such factor (`reasons`).
    """

    factors: dict[str, Tensor]
    before: dict[int, tuple[str, ...]]
    after: dict[int, tuple[str, ...]]
    reasons: dict[int, str]


@torch.no_grad()
def plan_scaling(model: nn.Module, flow: DataFlow, scales: Mapping[int, Tensor]) -> ScalingPlan:
    """The factors of all parameters that multiply each site's input by its scale, and divide behind it again.

    A homogeneous gate, g(c·x) = c·g(x), then leaves all outputs as they are.

    `scales` are positive, float64, by the index of a site of `flow`: one number, or one for each channel, shaped such
    that it broadcasts to the site's input.
    """
    reasons: dict[int, str] = {}
    layers: dict[Node, _LayerCall] = {}
    for index, value in scales.items():
        try:
            _add_neighbours(layers, flow, index, value)
        except NotAbsorbableError as reason:
            reasons[index] = str(reason)
    calls = layers.values()
    factors: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for call in calls for name in call.operation.parameters):
        try:
            factors[name] = _common_factor(name, model.get_parameter(name), layers, flow, scales)
        except NotAbsorbableError as reason:
            for index, _ in (
                site for call in calls if name in call.operation.parameters for site in call.before + call.after
            ):
                reasons.setdefault(index, str(reason))

    def weights_of(index: int, side: str) -> tuple[str, ...]:
        found = (call.operation.weight for call in calls if index in dict(getattr(call, side)))
        return tuple(dict.fromkeys(weight for weight in found if weight is not None))

    return ScalingPlan(
        factors,
        before={index: weights_of(index, "before") for index in scales},
        after={index: weights_of(index, "after") for index in scales},
        reasons=reasons,
    )


@torch.no_grad()
def scale_parameters(
    model: nn.Module,
    factors: Mapping[str, Tensor],
    inputs: Inputs,
    *,
    allowed: Callable[[Tensor], float],
    changed: str,
    exchanged: Sequence[tuple[ActivationSite, nn.Module]] = (),
) -> None:
    """Multiply parameters by their factors, in float64, rounded once to the parameter's dtype; the outputs stay.

    The outputs on `inputs` may move by what is `allowed` for each. The modules of `exchanged` go to their sites with
    the new parameters. `changed` is how the message names what was done, as "with its units rescaled".
    """
    parameters = {name: model.get_parameter(name) for name in factors}
    old = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    new = {}
    for name, factor in factors.items():
        # On the CPU: not every accelerator has float64.
        new[name] = (old[name].cpu().double() * factor).to(old[name].dtype).to(old[name].device)
        if torch.isfinite(old[name]).all() and not torch.isfinite(new[name]).all():
            raise ValueError(
                f"{name} multiplied by up to {factor.max().item():.4g} leaves the range of {old[name].dtype}; give the "
                "model in a wider dtype (model.float())"
            )

    def write(values: Mapping[str, Tensor], modules: Sequence[tuple[ActivationSite, nn.Module]]) -> None:
        for name, value in values.items():
            if not torch.equal(parameters[name], value):  # a parameter that cannot be written may stay as it is
                parameters[name].copy_(value)
        for site, module in modules:
            site.put(module)

    own = [(site, site.module) for site, _ in exchanged]
    before = outputs_of(model, inputs)
    try:
        write(new, exchanged)
        after = outputs_of(model, inputs)
    except BaseException:  # also of memory, or of who waits
        write(old, own)
        raise
    if agree(before, after, allowed):
        return
    write(old, own)
    raise ValueError(
        f"{changed} {type(model).__name__} gives other outputs, and it is as it was. A tensor that is no parameter or "
        "buffer may share a weight's memory, or numbers inside leave the range of their dtype (try model.float())"
    )


@dataclass
class _LayerCall:
    """One call of a layer, with the sites `before` which and `after` which it stands.

    A site is its index and the axis along which its scales run, None for a single scale.
    """

    operation: AffineOperation
    before: list[tuple[int, int | None]] = field(default_factory=list)
    after: list[tuple[int, int | None]] = field(default_factory=list)

    def factor(self, name: str, parameter: Tensor, hardness: Mapping[int, Tensor]) -> Tensor:
        """The factor that this call needs for its parameter of that name."""
        factor = torch.ones(1, dtype=torch.float64)
        for site, axis in self.before:
            factor = factor * _along_output(self.operation, name, parameter, hardness[site], axis)
        if name == self.operation.weight:
            for site, axis in self.after:
                factor = factor / _along_input(self.operation, parameter, hardness[site], axis)
        return factor


def _add_neighbours(layers: dict[Node, _LayerCall], flow: DataFlow, index: int, hardness: Tensor) -> None:
    calls = flow.calls.get(index)
    if not calls:
        raise NotAbsorbableError("the example inputs never reach it, or it runs where tracing does not look inside")
    varying = [axis for axis, size in enumerate(hardness.shape) if size > 1]
    if len(varying) > 1:
        raise NotAbsorbableError(
            f"it has a λ for each element of a feature map, {tuple(hardness.shape)}, and a layer has no weight of its "
            "own for each"
        )
    found = []  # whole before the first is added: a site is scaled around each of its calls, or not at all
    for call in calls:
        # Along which axis of the input λ runs, from 0.
        axis = call.meta["val"].dim() - hardness.dim() + varying[0] if varying else None
        found.append((layers_before(flow, call, call.args[0], axis), layer_after(flow, call, axis)))
    for before, (operation, axis) in found:
        for other, other_axis in before:
            layers.setdefault(other.node, _LayerCall(other)).before.append((index, other_axis))
        layers.setdefault(operation.node, _LayerCall(operation)).after.append((index, axis))


def _common_factor(
    name: str, parameter: Tensor, layers: Mapping[Node, _LayerCall], flow: DataFlow, hardness: Mapping[int, Tensor]
) -> Tensor:
    """The factor that every use of the parameter needs; NotAbsorbableError where one needs another, or none."""
    factors = []
    for user in flow.parameter_users(name):
        call = layers.get(user)
        if call is None or name not in call.operation.parameters:
            raise NotAbsorbableError(f"{name}, which would have to be scaled, is also used by {describe(user)}")
        factors.append(call.factor(name, parameter, hardness))
    if any(factor.shape != factors[0].shape or not torch.equal(factor, factors[0]) for factor in factors):
        raise NotAbsorbableError(
            f"{name} is used {len(factors)} times and would have to be scaled differently each time"
        )
    if name in flow.tied:
        raise NotAbsorbableError(
            f"{name}, which would have to be scaled, belongs to several modules, or its memory does"
        )
    return factors[0]


def _along_output(
    operation: AffineOperation, name: str, parameter: Tensor, hardness: Tensor, axis: int | None
) -> Tensor:
    """The factor of the weight or bias `name` that multiplies the layer's output by λ, broadcastable to the parameter.

    `axis` is that of the output along which λ runs, None for one λ.
    """
    if axis is None:
        return hardness.reshape(1)
    rank = len(shape_of(operation.node))
    if operation.channel_axis is None:  # aligned with the output at the right, as in broadcasting
        weight_axis = axis - rank + parameter.dim()
    elif axis != rank + operation.channel_axis:
        weight_axis = -1
    else:
        weight_axis = operation.output_axis if name == operation.weight else 0
    return _laid(operation, parameter, hardness, weight_axis)


def _along_input(operation: AffineOperation, parameter: Tensor, hardness: Tensor, axis: int | None) -> Tensor:
    """The factor of the layer's weight that multiplies the layer's data by λ, which runs along `axis` of the data."""
    if axis is None:
        return hardness.reshape(1)
    fits = operation.channel_axis is not None and axis == len(shape_of(operation.data)) + operation.channel_axis
    if operation.groups == 1:
        inputs = operation.input_axis if fits and operation.input_axis is not None else -1
        return _laid(operation, parameter, hardness, inputs)
    if not fits or not operation.is_direct:
        raise NotAbsorbableError(_misfit(operation, hardness))
    # A grouped convolution's output channel sees the inputs of its own group only.
    outputs_per_group = parameter.size(0) // operation.groups
    per_group = hardness.reshape(operation.groups, -1)
    return per_group.repeat_interleave(outputs_per_group, dim=0).reshape(
        parameter.size(0), parameter.size(1), *[1] * (parameter.dim() - 2)
    )


def _laid(operation: AffineOperation, parameter: Tensor, hardness: Tensor, axis: int) -> Tensor:
    if not operation.is_direct or axis < 0 or parameter.size(axis) != hardness.numel():
        raise NotAbsorbableError(_misfit(operation, hardness))
    shape = [1] * parameter.dim()
    shape[axis] = hardness.numel()
    return hardness.reshape(torch.Size(shape))


def _misfit(operation: AffineOperation, hardness: Tensor) -> str:
    return f"its {hardness.numel()} factors are not those of the channels of {describe(operation.node)}"
