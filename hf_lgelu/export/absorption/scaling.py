"""Scaling of the parameters around gates: each gate gets its input scaled, and the outputs stay.

The layers before and after a gate are found in a recording. Between them and the gate stand operations that let a
positive factor through, f(c·x) = c·f(x) for c > 0: layout, pooling, products.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from hf_lgelu.graph.maps import COPIES, RESHAPES, AffineOperation, describe, read_affine, shape_of
from hf_lgelu.graph.recorder import operation_name
from hf_lgelu.graph.recording import Recording
from hf_lgelu.networks.outputs import agree, outputs_of
from hf_lgelu.networks.run import Inputs
from hf_lgelu.networks.sites import ActivationSite

_SAME_ELEMENTS = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone"),
        *("transpose", "swapaxes", "swapdims", "permute", "t", "numpy_T", "movedim", "moveaxis", "alias", "detach"),
        *("expand", "slice", "select", "narrow", "index", "index_select", "roll", "flip", "pixel_shuffle"),
    )
)
_POOLING = frozenset(
    (
        *("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "mean", "sum", "amax"),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d"),
    )
)
_DROPOUT = frozenset(("dropout", "feature_dropout"))  # alpha_dropout adds a constant when it trains
_CASTS = frozenset(("to", "_to_copy", "type_as"))
_PRODUCTS = frozenset(("mul", "matmul", "mm", "bmm"))

_ELEMENTWISE = COPIES | _DROPOUT | _CASTS | {"mul", "div", "neg"}
_SWAPS = frozenset(("transpose", "swapaxes", "swapdims"))


def uses_once(user: Node, node: Node) -> bool:
    """Whether `node` is exactly one of the arguments of `user`."""
    return sum(leaf is node for leaf in pytree.tree_leaves((user.args, user.kwargs))) == 1


class NotAbsorbableError(ValueError):
    """The reason why the layers around a site cannot absorb λ; `absorb_hardness` names all sites in one ValueError."""


@dataclass(frozen=True)
class ScalingPlan:
    """The factors that scale the inputs of sites, and divide their outputs again in the layers after them.

    `factors` is {parameter: factor}, float64 and broadcastable to the parameter. `before` and `after` are {site index:
    weights of the layers there}. `reasons` is {site index: why there are no factors}.
    """

    factors: dict[str, Tensor]
    before: dict[int, tuple[str, ...]]
    after: dict[int, tuple[str, ...]]
    reasons: dict[int, str]


@torch.no_grad()
def plan_scaling(model: nn.Module, recording: Recording, scales: Mapping[int, Tensor]) -> ScalingPlan:
    """The factors of all parameters that multiply each site's input by its scale, and divide its output again.

    A homogeneous gate, g(c·x) = c·g(x), then leaves all outputs as they are.

    `scales` are positive, float64, by the index of a site: one number, or one for each channel, in a shape that
    broadcasts to the site's input.
    """
    reasons: dict[int, str] = {}
    layers: dict[Node, _LayerCall] = {}
    for index, value in scales.items():
        try:
            _add_neighbours(layers, recording, index, value)
        except NotAbsorbableError as reason:
            reasons[index] = str(reason)
    calls = layers.values()
    factors: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for call in calls for name in call.operation.parameters):
        try:
            factors[name] = _common_factor(name, model.get_parameter(name), layers, recording, scales)
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
    """Multiply parameters by their factors, in float64, and round once to the parameter's dtype; the outputs stay.

    Each output on `inputs` may move by the value of `allowed`. The modules of `exchanged` go to their sites with the
    new parameters. `changed` describes the change for the message, as "with its units rescaled".
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
    except BaseException:  # also without memory, or by an interrupt
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
    """One call of a layer: it stands before the sites in `before`, and after the sites in `after`.

    A site is (index, axis along which its scales run, or None for a single scale).
    """

    operation: AffineOperation
    before: list[tuple[int, int | None]] = field(default_factory=list)
    after: list[tuple[int, int | None]] = field(default_factory=list)

    def factor(self, name: str, parameter: Tensor, hardness: Mapping[int, Tensor]) -> Tensor:
        """The factor that this call needs for its parameter `name`."""
        factor = torch.ones(1, dtype=torch.float64)
        for site, axis in self.before:
            factor = factor * _along_output(self.operation, name, parameter, hardness[site], axis)
        if name == self.operation.weight:
            for site, axis in self.after:
                factor = factor / _along_input(self.operation, parameter, hardness[site], axis)
        return factor


def _add_neighbours(layers: dict[Node, _LayerCall], recording: Recording, index: int, hardness: Tensor) -> None:
    calls = recording.calls.get(index)
    if not calls:
        raise NotAbsorbableError("the example inputs never reach it, or it runs where tracing does not look inside")
    varying = [axis for axis, size in enumerate(hardness.shape) if size > 1]
    if len(varying) > 1:
        raise NotAbsorbableError(
            f"it has a λ for each element of a feature map, {tuple(hardness.shape)}, and a layer has no weight of its "
            "own for each"
        )
    found = []  # complete before the first is added: a site is scaled around all of its calls, or not at all
    for call in calls:
        # The axis of the input along which λ runs, from 0.
        axis = len(shape_of(call)) - hardness.dim() + varying[0] if varying else None
        found.append((layers_before(recording, call, call.args[0], axis), layer_after(recording, call, axis)))
    for before, (operation, axis) in found:
        for other, other_axis in before:
            layers.setdefault(other.node, _LayerCall(other)).before.append((index, other_axis))
        layers.setdefault(operation.node, _LayerCall(operation)).after.append((index, axis))


def _common_factor(
    name: str,
    parameter: Tensor,
    layers: Mapping[Node, _LayerCall],
    recording: Recording,
    hardness: Mapping[int, Tensor],
) -> Tensor:
    """The factor that every use of the parameter needs. Raises NotAbsorbableError where uses differ or have none."""
    factors, others = [], []
    for user in recording.parameter_users(name):
        call = layers.get(user)
        if call is None or name not in call.operation.parameters:
            others.append(user)
        else:
            factors.append(call.factor(name, parameter, hardness))
    if others:
        why = f"is also used by {describe(others[0])}"
    elif any(factor.shape != factors[0].shape or not torch.equal(factor, factors[0]) for factor in factors):
        why = f"is used {len(factors)} times, with another factor each time"
    elif name in recording.tied:
        why = "belongs to several modules, or its memory does"
    else:
        return factors[0]
    raise NotAbsorbableError(f"{name}, which would have to be scaled, {why}")


def _along_output(
    operation: AffineOperation, name: str, parameter: Tensor, hardness: Tensor, axis: int | None
) -> Tensor:
    """The factor of the weight or bias `name` that multiplies the layer's output by λ, broadcastable to the parameter.

    `axis` is the output's axis along which λ runs, None for one λ.
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
    """The factor of the weight that multiplies the layer's data by λ; λ runs along `axis` of the data."""
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


def layers_before(
    recording: Recording, user: Node, node: Node, axis: int | None
) -> list[tuple[AffineOperation, int | None]]:
    """The operations from `node`, an input of `user`, back to the layer to multiply by λ; the layer stands last.

    Each comes with the axis of its output along which λ runs. `axis` is this axis of `node`, counted from 0; None for
    one λ. Raises NotAbsorbableError with the reason where there is no layer.
    """
    others = [other for other in node.users if other is not user]
    if others or not uses_once(user, node):
        where = describe(others[0]) if others else describe(user)
        raise NotAbsorbableError(f"{describe(node)}, on the way to it, is also used by {where}")
    operation = read_affine(node, recording)
    if operation is not None and operation.weight is not None:
        return [(operation, axis)]
    if operation is not None:
        return [(operation, axis), *layers_before(recording, node, operation.data, axis)]
    # One operand for most operations, two for a product.
    sources = [operand for operand in node.all_input_nodes if _is_homogeneous(node, operand)]
    if not sources:
        where = f"one part of {describe(node.args[0])}" if node.target is operator.getitem else describe(node)
        raise NotAbsorbableError(f"its input comes from {where}, which is no layer with a weight of its own")
    reasons = []
    for source in sources:  # either factor of a product can take λ
        try:
            return layers_before(recording, node, source, _moved(_axis_before, node, source, axis))
        except NotAbsorbableError as reason:
            reasons.append(reason)
    raise reasons[0]


def layer_after(recording: Recording, node: Node, axis: int | None) -> tuple[AffineOperation, int | None]:
    """(the layer after `node` to divide by λ, the axis of its data along which λ runs); see `layers_before`."""
    while True:
        following = list(node.users)
        if len(following) != 1:
            named = " and ".join(describe(user) for user in following[:3])
            raise NotAbsorbableError(
                f"its output goes to {len(following)} places ({named})" if following else "nothing uses its output"
            )
        user = following[0]
        operation = read_affine(user, recording)
        if operation is not None and operation.mixes and operation.data is node:
            return operation, axis
        if not _is_homogeneous(user, node):
            raise NotAbsorbableError(
                f"its output goes into {describe(user)}, which is no layer that can be divided by a factor"
            )
        axis = _moved(_axis_after, user, node, axis)
        node = user


def _moved(move: Callable[[Node, Node, int], int | None], node: Node, source: Node, axis: int | None) -> int | None:
    if axis is None:
        return None
    moved = move(node, source, axis)
    if moved is None:
        raise NotAbsorbableError(f"the factors of its channels do not get through {describe(node)}")
    return moved


def _is_homogeneous(node: Node, source: Node) -> bool:
    """Whether a positive factor of `source` comes out of `node` unchanged, everything else held fixed."""
    name = operation_name(node)
    if not uses_once(node, source):
        return False
    if name in _DROPOUT:
        return node.args[2] is False
    if name in _CASTS:
        return node.meta["dtype"].is_floating_point
    if name in _PRODUCTS:
        return source in node.args[:2]
    if name == "div":
        return node.args[0] is source and node.kwargs.get("rounding_mode") is None
    if name in ("constant_pad_nd", "pad"):
        # Modes that repeat values of the tensor add no value of their own.
        place = 2 if name == "constant_pad_nd" else 3
        return not (node.args[place] if len(node.args) > place else node.kwargs.get("value"))
    # In operations like index, the first argument holds the values.
    return name == "neg" or (name in _SAME_ELEMENTS | _POOLING and node.args[0] is source)


def _axis_after(node: Node, source: Node, axis: int) -> int | None:
    """The axis of `node` that an axis of `source` becomes, both from 0; None where it is mixed, cut or resized."""
    name, before, after = operation_name(node), shape_of(source), shape_of(node)
    if name in _ELEMENTWISE:
        return axis if before == after else None
    if name in RESHAPES:
        return _same_place(before, after, axis)
    if name in _SWAPS:
        one, other = node.args[1] % len(before), node.args[2] % len(before)
        return {one: other, other: one}.get(axis, axis)
    if name == "t" and len(before) == 2:
        return 1 - axis
    if name == "permute":
        return [dim % len(before) for dim in node.args[1]].index(axis)
    if name == "mean" and len(node.args) > 1:
        averaged = {dim % len(before) for dim in node.args[1]}
        keeps = len(node.args) > 2 and node.args[2]
        if axis in averaged:
            return None
        return axis if keeps else axis - sum(dim < axis for dim in averaged)
    if name in _POOLING and name[-1:] == "d" and axis < len(before) - int(name[-2]):
        return axis
    return None


def _axis_before(node: Node, source: Node, axis: int) -> int | None:
    """The axis of `source` that becomes an axis of `node`: the inverse of `_axis_after`."""
    candidates = range(len(shape_of(source)))
    return next((candidate for candidate in candidates if _axis_after(node, source, candidate) == axis), None)


def _same_place(before: tuple[int, ...], after: tuple[int, ...], axis: int) -> int | None:
    """The axis of the same size with as many elements after it: a reshape leaves this axis as it is."""
    behind = prod(before[axis + 1 :])
    for place, size in enumerate(after):
        if size == before[axis] and size > 1 and prod(after[place + 1 :]) == behind:
            return place
    return None
