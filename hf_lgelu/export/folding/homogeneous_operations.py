"""Operations that let a positive factor through: f(c·x) = c·f(x) for c > 0. Layout, pooling, products."""

from math import prod

from torch.fx import Node

from hf_lgelu.models.dataflow.trace import COPIES, RESHAPES, operation_name, shape_of, uses_once

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


def is_homogeneous(node: Node, source: Node) -> bool:
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
        return not _pad_value(node, name)
    # Of index and its like, the first argument holds the values.
    return name == "neg" or (name in _SAME_ELEMENTS | _POOLING and node.args[0] is source)


def operands(node: Node) -> list[Node]:
    """The tensors whose factor comes out of `node`: one for most operations, two for a product."""
    return [operand for operand in node.all_input_nodes if is_homogeneous(node, operand)]


def axis_after(node: Node, source: Node, axis: int) -> int | None:
    """Where an axis of `source` lies in `node`, both counted from 0; None where it is mixed, cut or resized."""
    name, before, after = operation_name(node), shape_of(source), shape_of(node)
    if name in _ELEMENTWISE:
        return axis if before == after else None
    if name in RESHAPES:
        return _same_place(before, after, axis)
    if name in _SWAPS:
        return _swapped(node.args[1] % len(before), node.args[2] % len(before), axis)
    if name == "t" and len(before) == 2:
        return 1 - axis
    if name == "permute":
        return [dim % len(before) for dim in node.args[1]].index(axis)
    if name == "mean" and len(node.args) > 1:
        return _after_mean(node, len(before), axis)
    if name in _POOLING and name[-1:] == "d" and axis < len(before) - int(name[-2]):
        return axis
    return None


def axis_before(node: Node, source: Node, axis: int) -> int | None:
    """Where an axis of `node` lies in `source`: the inverse of `axis_after`."""
    candidates = range(len(shape_of(source)))
    return next((candidate for candidate in candidates if axis_after(node, source, candidate) == axis), None)


def _pad_value(node: Node, name: str) -> float:
    """What is put around; other modes repeat values of the tensor, which is as good as 0 here."""
    if name == "constant_pad_nd":
        return node.args[2] if len(node.args) > 2 else 0
    return (node.args[3] if len(node.args) > 3 else node.kwargs.get("value")) or 0


def _same_place(before: tuple[int, ...], after: tuple[int, ...], axis: int) -> int | None:
    """The axis of the same size with as many elements behind it, which a reshape leaves as it is."""
    behind = prod(before[axis + 1 :])
    for place, size in enumerate(after):
        if size == before[axis] and size > 1 and prod(after[place + 1 :]) == behind:
            return place
    return None


def _swapped(one: int, other: int, axis: int) -> int:
    return {one: other, other: one}.get(axis, axis)


def _after_mean(node: Node, rank: int, axis: int) -> int | None:
    averaged = {dim % rank for dim in node.args[1]}
    keeps = len(node.args) > 2 and node.args[2]
    if axis in averaged:
        return None
    return axis if keeps else axis - sum(dim < axis for dim in averaged)
