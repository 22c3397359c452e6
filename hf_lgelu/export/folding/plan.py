"""Which parameter is multiplied by what, so that every λ of a model is folded, or why that cannot be."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_lgelu.export.folding.neighbours import NotFoldableError, find_neighbours
from hf_lgelu.models.dataflow.affine_operations import AffineOperation
from hf_lgelu.models.dataflow.trace import DataFlow, describe, shape_of
from hf_lgelu.models.sites import ActivationSite


@dataclass(frozen=True)
class FoldPlan:
    """`factors` by parameter name, float64 and broadcastable to the parameter.

    By site index: λ in float64, and the weights of the layers before and after.
    """

    factors: dict[str, Tensor]
    hardness: list[Tensor]
    before: list[tuple[str, ...]]
    after: list[tuple[str, ...]]


@dataclass(frozen=True)
class ScalingPlan:
    """What multiplies the input of sites, and divides what becomes of their output.

    `factors` by parameter name, float64 and broadcastable to the parameter; by site index the weights of the layers
    `before` and `after`, and why there is no such factor (`reasons`).
    """

    factors: dict[str, Tensor]
    before: dict[int, tuple[str, ...]]
    after: dict[int, tuple[str, ...]]
    reasons: dict[int, str]


@torch.no_grad()
def plan_fold(model: nn.Module, sites: Sequence[ActivationSite], flow: DataFlow) -> FoldPlan:
    """The factors of all parameters that folding the λ of `sites` changes.

    Raises ValueError that names every site where it cannot be done, with the reason.
    """
    hardness = [site.module.hardness.detach().cpu().double() for site in sites]
    plan = plan_scaling(model, flow, dict(enumerate(hardness)))
    if plan.reasons:
        raise ValueError(_refusal(model, [(sites[index].name, plan.reasons[index]) for index in sorted(plan.reasons)]))
    return FoldPlan(plan.factors, hardness, list(plan.before.values()), list(plan.after.values()))


@torch.no_grad()
def plan_scaling(model: nn.Module, flow: DataFlow, scales: Mapping[int, Tensor]) -> ScalingPlan:
    """The factors of all parameters after which the input of each site is multiplied by its scale, and what a
    homogeneous gate gives divided by it.

    `scales` are positive, float64, by the index of a site of `flow`: one number, or one for each channel, shaped such
    that it broadcasts to the site's input.
    """
    reasons: dict[int, str] = {}
    layers: dict[Node, _LayerCall] = {}
    for index, value in scales.items():
        try:
            _add_neighbours(layers, flow, index, value)
        except NotFoldableError as reason:
            reasons[index] = str(reason)
    factors: dict[str, Tensor] = {}
    for name, parameter in _touched(model, layers).items():
        try:
            factors[name] = _common_factor(name, parameter, layers, flow, scales)
        except NotFoldableError as reason:
            for index in _sites_at(name, layers):
                reasons.setdefault(index, str(reason))
    calls = layers.values()
    return ScalingPlan(
        factors,
        before={index: _weights(call.operation for call in calls if index in dict(call.before)) for index in scales},
        after={index: _weights(call.operation for call in calls if index in dict(call.after)) for index in scales},
        reasons=reasons,
    )


@dataclass
class _LayerCall:
    """One call of a layer, and (site, axis along which its λ run or None) of those before and after which it stands."""

    operation: AffineOperation
    before: list[tuple[int, int | None]] = field(default_factory=list)
    after: list[tuple[int, int | None]] = field(default_factory=list)

    def factor(self, name: str, parameter: Tensor, hardness: Mapping[int, Tensor]) -> Tensor:
        """What this call needs its parameter of that name to be multiplied by."""
        factor = torch.ones(1, dtype=torch.float64)
        for site, axis in self.before:
            factor = factor * along_output(self.operation, name, parameter, hardness[site], axis)
        if name == self.operation.weight:
            for site, axis in self.after:
                factor = factor / along_input(self.operation, parameter, hardness[site], axis)
        return factor


def _add_neighbours(layers: dict[Node, _LayerCall], flow: DataFlow, index: int, hardness: Tensor) -> None:
    calls = flow.calls.get(index)
    if not calls:
        raise NotFoldableError("the example inputs never reach it, or it runs where tracing does not look inside")
    found = [find_neighbours(flow, call, _channel_axis(call, hardness)) for call in calls]
    for neighbours in found:
        for operation, axis in neighbours.before:
            layers.setdefault(operation.node, _LayerCall(operation)).before.append((index, axis))
        operation, axis = neighbours.after
        layers.setdefault(operation.node, _LayerCall(operation)).after.append((index, axis))


def _channel_axis(call: Node, hardness: Tensor) -> int | None:
    """The axis of the activation's input along which λ runs, from 0; None for a single λ."""
    if hardness.numel() == 1:
        return None
    varying = [axis for axis, size in enumerate(hardness.shape) if size > 1]
    if len(varying) > 1:
        raise NotFoldableError(
            f"it has a λ for each element of a feature map, {tuple(hardness.shape)}, and a layer has no weight of its "
            "own for each"
        )
    return call.meta["val"].dim() - hardness.dim() + varying[0]


def _touched(model: nn.Module, layers: Mapping[Node, _LayerCall]) -> dict[str, Tensor]:
    """The parameters of all layers, by name."""
    names = {}
    for call in layers.values():
        names.update(dict.fromkeys(name for name in (call.operation.weight, call.operation.bias) if name))
    return {name: model.get_parameter(name) for name in names}


def _sites_at(name: str, layers: Mapping[Node, _LayerCall]) -> set[int]:
    calls = [call for call in layers.values() if name in (call.operation.weight, call.operation.bias)]
    return {site for call in calls for site, _ in call.before + call.after}


def _common_factor(
    name: str, parameter: Tensor, layers: Mapping[Node, _LayerCall], flow: DataFlow, hardness: Mapping[int, Tensor]
) -> Tensor:
    """The factor that every use of the parameter needs; NotFoldableError where one needs another, or none."""
    factors = []
    for user in flow.parameter_users(name):
        call = layers.get(user)
        if call is None or name not in (call.operation.weight, call.operation.bias):
            raise NotFoldableError(f"{name}, which would have to be scaled, is also used by {describe(user)}")
        factors.append(call.factor(name, parameter, hardness))
    if any(factor.shape != factors[0].shape or not torch.equal(factor, factors[0]) for factor in factors):
        raise NotFoldableError(f"{name} is used {len(factors)} times and would have to be scaled differently each time")
    if flow.is_tied(name):
        raise NotFoldableError(f"{name}, which would have to be scaled, belongs to several modules, or its memory does")
    return factors[0]


def _weights(operations: Iterable[AffineOperation]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(operation.weight for operation in operations if operation.weight is not None))


def _refusal(model: nn.Module, reasons: Sequence[tuple[str, str]]) -> str:
    named = "".join(f"\n  {name}: {reason}" for name, reason in reasons)
    return (
        f"{type(model).__name__} cannot become a plain GELU model of the same function: λ does not fold into the "
        f"layers around {len(reasons)} of its activations:{named}\nKeep λ-GELU (save_pretrained), or harden the model "
        "and turn it into a ReLU model with export_relu"
    )


def along_output(
    operation: AffineOperation, name: str, parameter: Tensor, hardness: Tensor, axis: int | None
) -> Tensor:
    """The factor that multiplies the layer's output by λ, for its parameter `name` (weight or bias).

    Args:
        hardness: one λ, or one for each index of `axis`.
        axis: of the operation's output, from 0; None for one λ.

    Returns:
        A tensor of the dtype of `hardness`, broadcastable to the parameter.

    Raises NotFoldableError if the parameter has no axis of these channels.
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


def along_input(operation: AffineOperation, parameter: Tensor, hardness: Tensor, axis: int | None) -> Tensor:
    """The factor of the layer's weight that multiplies the layer's data by λ; as `along_output`.

    `axis` is one of the operation's data.
    """
    if axis is None:
        return hardness.reshape(1)
    fits = operation.channel_axis is not None and axis == len(shape_of(operation.data)) + operation.channel_axis
    if operation.groups == 1:
        inputs = operation.input_axis if fits and operation.input_axis is not None else -1
        return _laid(operation, parameter, hardness, inputs)
    if not fits or not operation.is_direct:
        raise NotFoldableError(_misfit(operation, hardness))
    # A grouped convolution's output channel sees the inputs of its own group only.
    outputs_per_group = parameter.size(0) // operation.groups
    per_group = hardness.reshape(operation.groups, -1)
    return per_group.repeat_interleave(outputs_per_group, dim=0).reshape(
        parameter.size(0), parameter.size(1), *[1] * (parameter.dim() - 2)
    )


def _laid(operation: AffineOperation, parameter: Tensor, hardness: Tensor, axis: int) -> Tensor:
    if not operation.is_direct or axis < 0 or parameter.size(axis) != hardness.numel():
        raise NotFoldableError(_misfit(operation, hardness))
    shape = [1] * parameter.dim()
    shape[axis] = hardness.numel()
    return hardness.reshape(torch.Size(shape))


def _misfit(operation: AffineOperation, hardness: Tensor) -> str:
    return f"its {hardness.numel()} factors are not those of the channels of {describe(operation.node)}"
