"""The layer before and the layer after an activation, found in the data flow.

Between stand operations that let a positive factor through, f(c·x) = c·f(x) for c > 0: layout, pooling, products.
"""

import operator
from collections.abc import Callable
from math import prod

from torch.fx import Node

from hf_lgelu.models.dataflow import (
    COPIES,
    RESHAPES,
    AffineOperation,
    DataFlow,
    describe,
    operation_name,
    read_affine,
    shape_of,
    users,
    uses_once,
)

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


class NotAbsorbableError(ValueError):
    """Why the layers around a site cannot absorb λ; `absorb_hardness` names all these sites in one ValueError."""


def layers_before(flow: DataFlow, user: Node, node: Node, axis: int | None) -> list[tuple[AffineOperation, int | None]]:
    """The operations between `node`, which `user` takes, and the layer to multiply by λ; the layer stands last.

    Each comes with the axis of its output along which λ runs. `axis` is that of `node`, counted from 0; None for one λ.
    Raises NotAbsorbableError with the reason where there is no layer.
    """
    others = [other for other in users(node) if other is not user]
    if others or not uses_once(user, node):
        where = describe(others[0]) if others else describe(user)
        raise NotAbsorbableError(f"{describe(node)}, on the way to it, is also used by {where}")
    operation = read_affine(node, flow)
    if operation is not None and operation.weight is not None:
        return [(operation, axis)]
    if operation is not None:
        return [(operation, axis), *layers_before(flow, node, operation.data, axis)]
    # One operand for most operations, two for a product.
    sources = [operand for operand in node.all_input_nodes if _is_homogeneous(node, operand)]
    if not sources:
        where = f"one part of {describe(node.args[0])}" if node.target is operator.getitem else describe(node)
        raise NotAbsorbableError(f"its input comes from {where}, which is no layer with a weight of its own")
    reasons = []
    for source in sources:  # either factor of a product can take λ
        try:
            return layers_before(flow, node, source, _moved(_axis_before, node, source, axis))
        except NotAbsorbableError as reason:
            reasons.append(reason)
    raise reasons[0]


def layer_after(flow: DataFlow, node: Node, axis: int | None) -> tuple[AffineOperation, int | None]:
    """The layer behind `node` to divide by λ, with the axis of its data along which λ runs; as `layers_before`."""
    while True:
        following = users(node)
        if len(following) != 1:
            named = " and ".join(describe(user) for user in following[:3])
            raise NotAbsorbableError(
                f"its output goes to {len(following)} places ({named})" if following else "nothing uses its output"
            )
        user = following[0]
        operation = read_affine(user, flow)
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
        return node.meta["val"].is_floating_point()
    if name in _PRODUCTS:
        return source in node.args[:2]
    if name == "div":
        return node.args[0] is source and node.kwargs.get("rounding_mode") is None
    if name in ("constant_pad_nd", "pad"):
        # Modes that repeat values of the tensor have no value of their own.
        place = 2 if name == "constant_pad_nd" else 3
        return not (node.args[place] if len(node.args) > place else node.kwargs.get("value"))
    # Of index and its like, the first argument holds the values.
    return name == "neg" or (name in _SAME_ELEMENTS | _POOLING and node.args[0] is source)


def _axis_after(node: Node, source: Node, axis: int) -> int | None:
    """Where an axis of `source` lies in `node`, both counted from 0; None where it is mixed, cut or resized."""
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
    """Where an axis of `node` lies in `source`: the inverse of `_axis_after`."""
    candidates = range(len(shape_of(source)))
    return next((candidate for candidate in candidates if _axis_after(node, source, candidate) == axis), None)


def _same_place(before: tuple[int, ...], after: tuple[int, ...], axis: int) -> int | None:
    """The axis of the same size with as many elements behind it, which a reshape leaves as it is."""
    behind = prod(before[axis + 1 :])
    for place, size in enumerate(after):
        if size == before[axis] and size > 1 and prod(after[place + 1 :]) == behind:
            return place
    return None
