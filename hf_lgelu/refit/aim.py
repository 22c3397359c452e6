"""The aim of a linear map: the value of the original that the map has to reproduce, and on which scale.

A map's output often passes a BatchNorm, a scale per channel and a residual sum before anything nonlinear. The refit
aims at the value behind these three operations, not at the map's own output. So it also corrects the drift on the
skip path.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hf_lgelu.models.dataflow import COPIES, RESHAPES, operation_name, shape_of, users

BATCH_NORMS = frozenset(("batch_norm", "_native_batch_norm_legit_no_training"))

Sizes = Callable[[Node], Sequence[int]]
"""node → the shape of its value."""

Move = Callable[[Tensor, Sizes], Tensor]


def norm_epsilon(norm: Node) -> float:
    """The number that a BatchNorm (an operation of BATCH_NORMS) adds to the variance."""
    return norm.args[7] if operation_name(norm) == "batch_norm" else norm.args[-1]


@dataclass(frozen=True)
class Aim:
    """The last node that a linear map's output reaches through sums, scales and moves alone.

    aim = moved(scale · output + …): `scale` is one number per output channel of the map, float64.

    Args:
        node: the aim.
        path: the operations from behind the map up to the aim.
        scale: ∂aim/∂output, per channel.
        layout: the moves (reshape, transposition) on the path, for comparison with another map's.
        undo: from the layout of the aim back to the output's.
        norm: the first BatchNorm on the path, and ∂aim/∂(its output).
    """

    node: Node
    path: tuple[Node, ...]
    scale: Tensor
    layout: tuple[Any, ...]
    undo: tuple[Move, ...]
    norm: Node | None
    scale_behind_norm: Tensor

    def in_output_layout(self, value: Tensor, sizes: Sizes) -> Tensor:
        """A tensor like the aim, laid out as the map's output."""
        for move in reversed(self.undo):
            value = move(value, sizes)
        return value


class AimFinder:
    """The aims of the maps in one graph; `constant(node)` is the value of a node that does not depend on the inputs."""

    def __init__(self, varying: Collection[Node], constant: Callable[[Node], Any]) -> None:
        self._varying, self._constant = varying, constant

    def varies(self, node: Node) -> bool:
        """Whether a node depends on the inputs."""
        return node in self._varying

    def find(self, output: Node, channel_axis: int) -> Aim:
        """The aim of a map with this output, whose channels lie along `channel_axis` (from the right)."""
        walk = _Walk(output, channel_axis)
        while True:
            following = users(walk.node)
            if len(following) != 1 or not self._step(walk, following[0]):
                return walk.aim()

    def source(self, node: Node) -> Node | None:
        """The operand whose channels the node keeps apart, or None: the path backwards."""
        name = operation_name(node)
        if node.target is operator.getitem and operation_name(node.args[0]) in BATCH_NORMS:
            return node.args[0]
        if name in BATCH_NORMS or name in COPIES or name in RESHAPES or name in ("permute", "transpose"):
            return node.args[0]
        if name in ("add", "sub", "mul", "div"):
            varying = [operand for operand in node.all_input_nodes if operand in self._varying]
            return varying[0] if len(varying) == 1 else None
        return None

    def _step(self, walk: "_Walk", user: Node) -> bool:
        """Whether `user` keeps the channels apart; if so, the walk goes on to `user`."""
        name = operation_name(user)
        if user.target is operator.getitem:
            return operation_name(user.args[0]) in BATCH_NORMS and user.args[1] == 0 and walk.go(user)
        if name in BATCH_NORMS:
            return self._normalize(walk, user)
        if name in COPIES:
            return walk.go(user)
        if name in RESHAPES or name in ("permute", "transpose"):
            return walk.move(user, name)
        if name in ("add", "sub"):
            return self._sum(walk, user, name)
        if name in ("mul", "div"):
            return self._scaling(walk, user, name)
        return False

    def _normalize(self, walk: "_Walk", user: Node) -> bool:
        if user.args[0] is not walk.node or any(node in self._varying for node in user.args[1:5] if node is not None):
            return False
        weight = None if user.args[1] is None else self._constant(user.args[1])
        if operation_name(user) == "batch_norm" and user.args[5]:
            return False
        scale = (self._constant(user.args[4]).double() + norm_epsilon(user)).rsqrt()
        scale = scale if weight is None else scale * weight.double()
        shape = [1, -1] + [1] * (len(walk.shape) - 2)
        # A norm over another axis, or over several channels of the map together, has no bias per channel of the map.
        channels = walk.per_channel(torch.arange(len(scale)).view(shape))
        if channels is None or channels.tolist() != list(range(len(scale))):
            return False
        return walk.scale_by(scale.view(shape)) and walk.normalize(user)

    def _sum(self, walk: "_Walk", user: Node, name: str) -> bool:
        left, right = user.args[:2]
        if user.kwargs.get("alpha", 1) != 1 or left is right or shape_of(user) != walk.shape:
            return False
        if name == "sub" and right is walk.node and not walk.scale_by(torch.tensor(-1.0)):
            return False
        return walk.go(user)

    def _scaling(self, walk: "_Walk", user: Node, name: str) -> bool:
        left, right = user.args[:2]
        other = right if left is walk.node else left
        if left is right or shape_of(user) != walk.shape or user.kwargs.get("rounding_mode") is not None:
            return False
        if name == "div" and left is not walk.node:
            return False
        if isinstance(other, Node):
            if other in self._varying:
                return False
            other = self._constant(other)
        factor = torch.as_tensor(other, dtype=torch.float64)
        return walk.scale_by(1 / factor if name == "div" else factor) and walk.go(user)


class _Walk:
    """The path from a map's output to the current node."""

    def __init__(self, output: Node, channel_axis: int) -> None:
        self.node = output
        self._path: list[Node] = []
        self._channels = len(shape_of(output)) + channel_axis
        self._scale = self._behind_norm = torch.ones(shape_of(output)[channel_axis], dtype=torch.float64)
        self._layout: list[Any] = []
        self._undo: list[Move] = []
        self._norm: Node | None = None
        self.shape = shape_of(output)

    def aim(self) -> Aim:
        return Aim(
            self.node, tuple(self._path), self._scale, tuple(self._layout), tuple(self._undo), self._norm,
            self._behind_norm,
        )  # fmt: skip

    def go(self, user: Node) -> bool:
        self.node = user
        self._path.append(user)
        return True

    def normalize(self, user: Node) -> bool:
        if self._norm is None:
            self._norm, self._behind_norm = user, torch.ones_like(self._scale)
        return self.go(user)

    def scale_by(self, factor: Tensor) -> bool:
        """Whether a factor, broadcast to the current shape, is one number per channel; if so, multiply by it."""
        factors = self.per_channel(factor)
        if factors is None:
            return False
        self._scale = self._scale * factors
        self._behind_norm = self._behind_norm * factors
        return True

    def per_channel(self, factor: Tensor) -> Tensor | None:
        """A factor, broadcast to the current shape, as one number per channel of the map; None for any other factor."""
        factor = factor.double().cpu().expand(self.shape)
        for move in reversed(self._undo):
            factor = move(factor, shape_of)
        rows = factor.movedim(self._channels, -1).flatten(0, -2)
        return rows[0] if torch.equal(rows, rows[:1].expand_as(rows)) else None

    def move(self, user: Node, name: str) -> bool:
        before = self.node
        if name in RESHAPES:
            self._undo.append(lambda value, sizes: value.reshape(sizes(before)))
        elif name == "permute":
            order = [axis % len(self.shape) for axis in user.args[1]]
            self._undo.append(lambda value, sizes: value.permute([order.index(axis) for axis in range(len(order))]))
        else:
            first, second = user.args[1:3]
            self._undo.append(lambda value, sizes: value.transpose(first, second))
        self._layout.append((name, tuple(map(str, user.args[1:]))))
        self.shape = shape_of(user)
        return self.go(user)
