"""The layer before and the layer after an activation, found in the data flow."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from hf_lgelu.export.folding.homogeneous_operations import axis_after, axis_before, is_homogeneous, operands
from hf_lgelu.models.dataflow.affine_operations import AffineOperation, read_affine
from hf_lgelu.models.dataflow.trace import DataFlow, describe, is_site, operation_name, users, uses_once


class NotFoldableError(ValueError):
    """Why λ cannot be folded into the layers around a site; `fold_hardness` names all of these in one ValueError.

    Example:
        >>> import torch
        >>> from hf_lgelu import LambdaGELU, fold_hardness
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), LambdaGELU())  # no layer behind it
        >>> fold_hardness(model, torch.randn(2, 3))
        Traceback (most recent call last):
        ValueError: Sequential cannot become ...
    """


@dataclass(frozen=True)
class Neighbours:
    """The layers around one call of a site: those to multiply by λ, and the one to divide.

    `before` ends with the layer itself; sums with a parameter on the way to it come first. Axes are those of the
    operations' outputs (`before`) and data (`after`) along which λ runs, counted from 0; None for a single λ.
    """

    before: tuple[tuple[AffineOperation, int | None], ...]
    after: tuple[AffineOperation, int | None]


def find_neighbours(flow: DataFlow, call: Node, axis: int | None) -> Neighbours:
    """The layers around one call; `axis` is that of the activation's input along which λ runs, None for one λ.

    Raises NotFoldableError with the reason.
    """
    return Neighbours(tuple(_layers_before(flow, call, call.args[0], axis)), _layer_after(flow, call, axis))


def _layers_before(
    flow: DataFlow, user: Node, node: Node, axis: int | None
) -> list[tuple[AffineOperation, int | None]]:
    others = [other for other in users(node) if other is not user]
    if others or not uses_once(user, node):
        where = describe(others[0]) if others else describe(user)
        raise NotFoldableError(f"{describe(node)}, on the way to it, is also used by {where}")
    operation = read_affine(node, flow)
    if operation is not None and operation.weight is not None:
        return [(operation, axis)]
    if operation is not None:
        return [(operation, axis), *_layers_before(flow, node, operation.data, axis)]
    sources = operands(node)
    if not sources:
        raise NotFoldableError(_why_not_before(node))
    return _first_that_folds(
        lambda source: _layers_before(flow, node, source, _moved(axis_before, node, source, axis)), sources
    )


def _first_that_folds(find: Callable[[Node], list], sources: Sequence[Node]) -> list:
    reasons = []
    for source in sources:  # either factor of a product can take λ
        try:
            return find(source)
        except NotFoldableError as reason:
            reasons.append(reason)
    raise reasons[0]


def _layer_after(flow: DataFlow, node: Node, axis: int | None) -> tuple[AffineOperation, int | None]:
    while True:
        following = users(node)
        if len(following) != 1:
            named = " and ".join(describe(user) for user in following[:3])
            raise NotFoldableError(
                f"its output goes to {len(following)} places ({named})" if following else "nothing uses its output"
            )
        user = following[0]
        operation = read_affine(user, flow)
        if operation is not None and operation.mixes and operation.data is node:
            return operation, axis
        if not is_homogeneous(user, node):
            raise NotFoldableError(_why_not_after(user))
        axis = _moved(axis_after, user, node, axis)
        node = user


def _moved(move: Callable[[Node, Node, int], int | None], node: Node, source: Node, axis: int | None) -> int | None:
    if axis is None:
        return None
    moved = move(node, source, axis)
    if moved is None:
        raise NotFoldableError(f"the factors of its channels do not get through {describe(node)}")
    return moved


def _why_not_before(node: Node) -> str:
    if operation_name(node) in ("add", "sub"):
        return f"its input is a sum ({describe(node)}), as behind a residual connection"
    if is_site(node):
        return f"its input is the output of {describe(node)}, with no layer between"
    if node.target is operator.getitem:
        return f"its input is one part of {describe(node.args[0])}, whose other parts are not activated"
    if node.op == "placeholder":
        return "its input is the model's, and no layer is before it"
    return f"its input comes from {describe(node)}, which is no layer with a weight of its own"


def _why_not_after(user: Node) -> str:
    if user.op == "output":
        return "its output is the model's, and no layer is behind it"
    if is_site(user):
        return f"its output is the input of {describe(user)}, with no layer between"
    if operation_name(user) in ("add", "sub"):
        return f"its output goes into a sum ({describe(user)})"
    return f"its output goes into {describe(user)}, which is no layer that can be divided by a factor"
