"""A linear map after gates, and the value that it has to reproduce: its aim.

A map's output often passes a BatchNorm, a scale per channel and a residual sum before anything nonlinear. The refit
aims at the value after these operations, and so corrects the drift on the skip path, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from hf_lgelu.graph.maps import COPIES, RESHAPES, AffineOperation, Geometry, read_geometry, shape_of
from hf_lgelu.graph.recorder import operation_name
from hf_lgelu.graph.recording import Recording, StoredValue

_MOVES = RESHAPES | {"permute", "transpose"}

Sizes = Callable[[Node], Sequence[int]]
"""node → the shape of its value."""


@dataclass(eq=False)
class LinearMap:
    """A linear map, and its aim: the last node that its output reaches through only sums, scales and moves.

    aim = moved(gain · output + …): `gain` is one number per output channel of the map, float64. `bias` is the map's,
    or that of the BatchNorm after it, where it is used as often as the weight.
    """

    operation: AffineOperation
    aim: Node
    aim_shape: tuple[int, ...]  # of its value, on the traced inputs
    channels: int  # the axis of the map's output along which its channels lie, from the left
    gain: Tensor  # ∂aim/∂output, per channel
    gain_after_norm: Tensor  # ∂aim/∂(the output of `norm`); without a norm the gain
    to_aim: list[Node] = field(default_factory=list)  # the operations after the map, up to the aim
    layout: tuple[Any, ...] = ()  # the moves (reshape, transposition) on the way, to compare with another map's
    undo: list[Callable[[Tensor, Sizes], Tensor]] = field(default_factory=list)  # back to the layout of the output
    norm: Node | None = None  # the first BatchNorm on the way
    bias: StoredValue | None = None  # to which a constant per channel can be added
    bias_gain: Tensor | None = None  # ∂aim/∂bias, per channel

    @cached_property
    def geometry(self) -> Geometry:
        """The geometry of the map's features."""
        return cast(Geometry, read_geometry(self.operation))

    @property
    def name(self) -> str:
        """The name of the module that holds the weight."""
        return self.operation.weight_name.rpartition(".")[0] or self.operation.weight_name

    @property
    def width(self) -> int:
        """The number of features in a row: the map's inputs, or a group's channels times the size of the kernel."""
        inputs = shape_of(self.operation.data)
        return inputs[-1] if self.geometry.kind == "linear" else self.geometry.width(inputs[1])

    def in_output_layout(self, value: Tensor, sizes: Sizes) -> Tensor:
        """A tensor like the aim, laid out as the map's output."""
        for move in reversed(self.undo):
            value = move(value, sizes)
        return value

    def per_channel(self, factor: Tensor) -> Tensor | None:
        """A factor, broadcast to the aim's shape, as one number per channel of the map; None for any other factor."""
        factor = self.in_output_layout(factor.double().cpu().expand(self.aim_shape), shape_of)
        rows = factor.movedim(self.channels, -1).flatten(0, -2)
        return rows[0] if torch.equal(rows, rows[:1].expand_as(rows)) else None

    def multiply_gain(self, factor: Tensor) -> bool:
        """Whether a factor, broadcast to the aim's shape, is one number per channel; if so, multiply by it."""
        factors = self.per_channel(factor)
        if factors is None:
            return False
        self.gain = self.gain * factors
        self.gain_after_norm = self.gain_after_norm * factors
        return True


class AimFinder:
    """The linear maps of a recording with their aims. Scales and offsets are those of the recorded `model`."""

    def __init__(self, recording: Recording, model: nn.Module) -> None:
        self.recording = recording
        self._varying = recording.downstream(recording.inputs)  # the nodes that depend on the inputs
        self._constant = recording.constants(model)
        self._found: dict[Node, LinearMap] = {}

    def varies(self, node: Node) -> bool:
        """Whether a node depends on the inputs."""
        return node in self._varying

    def moved_by_constant(self, node: Node) -> Node | None:
        """The one operand of a sum, difference, product or quotient that depends on the inputs; None for other nodes.

        The other operand is a constant, and no divisor.
        """
        if operation_name(node) not in ("add", "sub", "mul", "div"):
            return None
        varying = [each for each in node.args[:2] if each in self._varying]
        is_divisor = operation_name(node) == "div" and varying[:1] != [node.args[0]]
        return cast(Node, varying[0]) if len(varying) == 1 and not is_divisor else None

    def between(self, source: AffineOperation, path: Sequence[Node]) -> tuple[Tensor, Tensor] | None:
        """(factor, offset) per channel of sums and products with constants after a map, the last one first; float64.

        None where they are no numbers per channel, or a factor is 0.
        """
        axis, shape = -1 if source.channel_axis is None else source.channel_axis, shape_of(source.node)
        one_place = [size if place == axis % len(shape) else 1 for place, size in enumerate(shape)]
        ends = []
        for value in torch.zeros(one_place, dtype=torch.float64), torch.ones(one_place, dtype=torch.float64):
            for node in reversed(path):
                constants = {each: self._constant(each) for each in node.all_input_nodes if each not in self._varying}
                known = {each: found.double().cpu() for each, found in constants.items()}
                value = node.target(
                    *map_arg(node.args, lambda each, value=value, known=known: known.get(each, value)), **node.kwargs
                )
            ends.append(value)
        if any(list(value.shape) != one_place for value in ends) or bool((ends[0] == ends[1]).any()):
            return None
        return (ends[1] - ends[0]).flatten(), ends[0].flatten()

    def find(self, operation: AffineOperation) -> LinearMap:
        """A map with its aim and its bias."""
        output, channel_axis = operation.node, operation.channel_axis or 0
        if output in self._found:
            return self._found[output]
        shape = shape_of(output)
        ones = torch.ones(shape[channel_axis], dtype=torch.float64)
        linear = LinearMap(operation, output, shape, len(shape) + channel_axis, ones, ones)
        while len(following := list(linear.aim.users)) == 1 and self._keeps_apart(linear, following[0]):
            linear.aim = following[0]
            linear.to_aim.append(linear.aim)
        after_norm = None if linear.norm is None else self.recording.stored_value(linear.norm.args[2])
        is_tied = operation.weight_name in self.recording.tied  # an embedding may use it, too
        uses = 1 if is_tied else len(self.recording.parameter_users(operation.weight_name))
        for stored, gain in ((after_norm, linear.gain_after_norm), (operation.bias, linear.gain)):
            # A bias may have two names, as a language model's head has. In shared memory it is part of other tensors.
            if stored is None or stored.name in self.recording.in_shared_memory:
                continue
            if len(self.recording.parameter_users(stored.name)) == uses:
                linear.bias, linear.bias_gain = stored, gain  # rather its own than the norm's
        self._found[output] = linear
        return linear

    def _keeps_apart(self, linear: LinearMap, user: Node) -> bool:
        """Whether `user` keeps a map's channels apart; if so, the map's gain and layout now include `user`."""
        name = operation_name(user)
        if name == "batch_norm":
            return self._normalizes(linear, user)
        if name in _MOVES:
            linear.undo.append(_back(linear.aim, user, name))
            linear.layout += ((name, shape_of(user) if name in RESHAPES else tuple(map(str, user.args[1:]))),)
            linear.aim_shape = shape_of(user)
            return True
        if name in COPIES:
            return True
        if name not in ("add", "sub", "mul", "div"):
            return False
        left, right = user.args[:2]
        has_options = bool({*user.kwargs.values()} - {1, None})  # alpha, rounding_mode
        if left is right or shape_of(user) != linear.aim_shape or has_options:
            return False
        if name == "add" or (name == "sub" and left is linear.aim):
            return True
        if name == "sub":
            return linear.multiply_gain(torch.tensor(-1.0))
        other = right if left is linear.aim else left
        if other in self._varying or (name == "div" and left is not linear.aim):
            return False
        factor = torch.as_tensor(self._constant(other) if isinstance(other, Node) else other, dtype=torch.float64)
        return linear.multiply_gain(1 / factor if name == "div" else factor)

    def _normalizes(self, linear: LinearMap, user: Node) -> bool:
        if user.args[0] is not linear.aim or any(node in self._varying for node in user.args[1:5] if node is not None):
            return False
        factor = (self._constant(user.args[4]).double() + user.args[7]).rsqrt()
        if user.args[1] is not None:
            factor = factor * self._constant(user.args[1]).double()
        factor = factor.view([1, -1] + [1] * (len(linear.aim_shape) - 2))
        # A norm over another axis, or over several channels of the map together, has no bias per channel of the map.
        channels = linear.per_channel(torch.arange(factor.numel()).view(factor.shape))
        if channels is None or channels.tolist() != list(range(factor.numel())) or not linear.multiply_gain(factor):
            return False
        if linear.norm is None:
            linear.norm, linear.gain_after_norm = user, torch.ones_like(linear.gain)
        return True


def _back(before: Node, move: Node, name: str) -> Callable[[Tensor, Sizes], Tensor]:
    """The reverse of a move, as a function of the moved value."""
    if name in RESHAPES:
        return lambda value, sizes: value.reshape(sizes(before))
    if name == "permute":
        order = [axis % len(move.args[1]) for axis in move.args[1]]
        return lambda value, sizes: value.permute([order.index(axis) for axis in range(len(order))])
    return lambda value, sizes: value.transpose(*move.args[1:3])
