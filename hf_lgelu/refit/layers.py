"""The linear maps behind a model's gates, found in the graph of one forward pass, and why a map cannot be refitted.

A gate's consumers are the first linear maps on every path from its output. Operations between gate and map (dropout,
pooling, a product with the other half of a gated unit, a normalization) run unchanged. Where a path enters a residual
sum, the map on the other side of the sum is a consumer, too: its output can correct the drift on the skip path.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_lgelu.models.dataflow import (
    AffineOperation,
    DataFlow,
    describe,
    is_site,
    operation_name,
    read_affine,
    shape_of,
    sizes_decided_by,
    users,
)
from hf_lgelu.models.sites import ActivationSite
from hf_lgelu.refit.aim import Aim, AimFinder
from hf_lgelu.refit.features import Geometry, read_geometry, row_width
from hf_lgelu.refit.gate_units import GateUnit, find_gate_units, product_behind, views_back
from hf_lgelu.refit.program import Program, upstream

_PRODUCTS = frozenset(("mm", "bmm", "matmul", "addmm", "baddbmm", "einsum", "linear", "_grouped_mm", "convolution"))
_OTHER_LAYERS = frozenset(("bilinear", "_trilinear", "lstm", "gru", "rnn_tanh", "rnn_relu"))


@dataclass(frozen=True)
class LinearMap:
    """A linear map behind gates: its operation, how its features are read off its input, and its aim."""

    operation: AffineOperation
    geometry: Geometry
    aim: Aim
    bias: "Bias | None"

    @property
    def name(self) -> str:
        """The name of the module that holds the weight."""
        weight = cast(str, self.operation.weight)  # a map that mixes channels has a weight
        return weight.rpartition(".")[0] or weight

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the weight and of the parameter that takes the constant."""
        return (self.operation.weight, *(() if self.bias is None else (self.bias.parameter,)))

    @property
    def width(self) -> int:
        """The number of features in a row."""
        return row_width(self.operation, self.geometry)

    @property
    def data(self) -> Node:
        """The input of the map."""
        return self.operation.data

    @property
    def node(self) -> Node:
        """The output of the map."""
        return self.operation.node


@dataclass(frozen=True)
class Bias:
    """A parameter to which a constant per channel can be added, and ∂aim/∂parameter per channel."""

    parameter: str
    scale: Tensor


@dataclass(frozen=True)
class Layer:
    """The maps that feed one sum and are solved together (most often a single map), and the gates before them.

    A layer without gates reads what gated units have written (`_readers`). `unit` is the gate of a depthwise map, where
    nothing else takes its output: the map mixes no channels, so the kinks of its gate are chosen with its weights.
    `more_uses` are the other places where a forward pass uses the map (one layer for all depths, a head for several
    sizes): the rows of all uses are one least-squares problem. `is_used_in_turn` says whether one reads what another
    has written.
    """

    maps: tuple[LinearMap, ...]
    sites: tuple[int, ...]
    unit: GateUnit | None = None
    more_uses: tuple[LinearMap, ...] = ()
    is_used_in_turn: bool = False

    @property
    def name(self) -> str:
        """The names of the maps, joined."""
        return " and ".join(consumer.name for consumer in self.maps)

    @property
    def aim(self) -> Node:
        """The node whose value in the original the layer has to reproduce."""
        return self.maps[0].aim.node

    @property
    def uses(self) -> tuple[tuple[LinearMap, ...], ...]:
        """The maps at each place where they are used."""
        return (self.maps, *((use,) for use in self.more_uses))

    @property
    def width(self) -> int:
        """The number of features in a row of all maps together."""
        return sum(consumer.width for consumer in self.maps)

    @property
    def has_intercept(self) -> bool:
        """Whether a constant per output channel can be added at one of the maps."""
        return any(consumer.bias is not None for consumer in self.maps)


@dataclass(frozen=True)
class Unfit:
    """A map, or the end of a path, that cannot be refitted; `sites` are the gates before it."""

    name: str
    sites: tuple[int, ...]
    reason: str


@dataclass
class Layers:
    """The layers to refit, in the order of computation, and the maps that cannot be refitted.

    `beside` are gates that run, but that no compared output depends on; `misread` the names of gates that work in place
    on what is used again: the program has no operations in place, and would compute something else than the model.
    """

    layers: list[Layer] = field(default_factory=list)
    unfit: list[Unfit] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    misread: list[str] = field(default_factory=list)

    def refuse(self, name: str, sites: tuple[int, ...], reason: str) -> None:
        """Note a map that cannot be refitted: once, however often the map runs and however many gates lead to it."""
        for place, known in enumerate(self.unfit):
            if (known.name, known.reason) == (name, reason):
                sites = tuple(sorted({*known.sites, *sites}))
                self.unfit[place] = Unfit(name, sites, reason)
                return
        self.unfit.append(Unfit(name, sites, reason))


def find_layers(program: Program, model: nn.Module, sites: Sequence[ActivationSite]) -> Layers:
    """The layers behind `sites`, by index, in a trace of `model`."""
    flow = program.flow
    finder = AimFinder(program.downstream(program.inputs), program.constants(model))
    order = {node: position for position, node in enumerate(program.operations)}
    reached: dict[Node, set[int]] = {}
    found = Layers()
    for index, site in enumerate(sites):
        calls = flow.calls.get(index, [])
        if not calls and index in flow.reached:
            found.beside.append(index)
        elif not calls:
            found.refuse(site.name, (index,), "the inputs never reach this gate")
        for call in calls:
            if getattr(site.module, "inplace", False) and any(
                order.get(user, 0) > order[call] for user in users(call.args[0])
            ):
                found.misread.append(site.name)
            for consumer in _consumers(program, call, finder, found, index, site.name):
                reached.setdefault(consumer, set()).add(index)
    maps: list[tuple[LinearMap, set[int]]] = []
    others: dict[Node, tuple[LinearMap, ...]] = {}
    for node in sorted(reached, key=order.__getitem__):
        if any(node is use.node for uses in others.values() for use in uses):
            continue
        operation = _as_stored(cast(AffineOperation, read_affine(node, flow)), flow)
        geometry = read_geometry(operation)
        reason = _why_not(program, model, operation, geometry)
        if reason is not None or geometry is None:
            found.refuse(operation.weight or describe(node), tuple(sorted(reached[node])), str(reason))
            continue
        first, *rest = uses = [_map_at(program, finder, use) for use in _uses(program, operation)]
        if not all(torch.equal(use.aim.scale, first.aim.scale) for use in rest):
            reason = f"{operation.weight} is used {len(uses)} times in a forward pass, with another scale behind"
            found.refuse(operation.weight_name, tuple(sorted(reached[node])), reason)
            continue
        others[first.node] = tuple(rest)
        maps.append((first, set().union(*(reached.get(use.node, ()) for use in uses))))
    maps += [(reader, set()) for reader in _readers(program, model, finder, reached)]
    units = {flow.calls[unit.site][0]: unit for unit in find_gate_units(program) if unit.other is None}
    layers = []
    for layer in _grouped(maps, others):
        more = others.get(layer.maps[0].node, ())
        written = program.downstream([use.node for use in (layer.maps[0], *more)]) if more else set()
        in_turn = any(use.data in written for use in more)
        unit = None if more else _unit_before(layer, units)
        layers.append(replace(layer, unit=unit, more_uses=more, is_used_in_turn=in_turn))
    found.layers = sorted(layers, key=lambda layer: max(order[use[0].aim.node] for use in layer.uses))
    return found


def gates_before(program: Program, consumer: LinearMap) -> list[Node]:
    """The gates from which a map takes its input, with no other map in between."""
    found, waiting, seen = [], [consumer.data], {consumer.data}
    while waiting:
        node = waiting.pop()
        operation = None if is_site(node) else read_affine(node, program.flow)
        if is_site(node):
            found.append(node)
        elif operation is None or not operation.mixes:
            waiting += set(node.all_input_nodes) - seen
            seen.update(node.all_input_nodes)
    return found


def _uses(program: Program, operation: AffineOperation) -> list[AffineOperation]:
    """The operations that take the weight of a map, in their order; all are affine (see `_why_not`)."""
    takers = set(program.flow.parameter_users(operation.weight_name))
    found = (read_affine(node, program.flow) for node in program.operations if node in takers)
    return [_as_stored(each, program.flow) for each in found if each is not None]


def _map_at(program: Program, finder: AimFinder, operation: AffineOperation) -> LinearMap:
    """A map with its aim."""
    aim = finder.find(operation.node, cast(int, operation.channel_axis))
    return LinearMap(operation, cast(Geometry, read_geometry(operation)), aim, _bias(program, operation, aim))


def _unit_before(layer: Layer, units: Mapping[Node, GateUnit]) -> GateUnit | None:
    """The gate right before a depthwise map, if the map alone takes its output, and the map before has a bias."""
    consumer = layer.maps[0]
    if consumer.geometry.groups == 1 or consumer.width != math.prod(consumer.geometry.kernel):
        return None
    path = [*views_back(consumer.data)]
    unit = units.get(path[-1])
    is_alone = all(len(users(node)) == 1 for node in path) and shape_of(path[-1]) == shape_of(consumer.data)
    if unit is None or unit.before.bias is None or not is_alone:
        return None
    return unit if unit.before.channel_axis == consumer.operation.channel_axis else None


def _consumers(program: Program, call: Node, finder: AimFinder, found: Layers, site: int, gate: str) -> Iterator[Node]:
    """The linear maps on the paths from a gate's output; a path without a map is noted in `found`."""
    waiting, seen = [call], {call}
    while waiting:
        node = waiting.pop()
        for user in users(node):
            if user in seen:
                continue
            seen.add(user)
            operation = read_affine(user, program.flow)
            if operation is not None and operation.mixes and operation.data is node:
                yield user
            elif user.op == "output":
                reason = "its output is the model's, and no linear map with weights is behind it (outputs= chooses)"
                found.refuse(gate, (site,), reason)
            elif _holds_weights(program, finder, user):
                reason = f"{describe(user)} takes weights in a form that is no plain linear layer"
                found.refuse(describe(user), (site,), reason)
            else:
                other = _map_beside(program, finder, user, node)
                if other is None:
                    waiting.append(user)
                else:
                    yield other


def _readers(program: Program, model: nn.Module, finder: AimFinder, behind: Collection[Node]) -> Iterator[LinearMap]:
    """The linear maps that read what gated units have written, and stand behind no gate themselves.

    A gated unit is φ(g)·u, and ReLU(g) is near φ(g) - b with a constant b. The part b·u, which no ReLU carries, is
    linear in what the block has read, and so partly linear in what later maps read.
    """
    calls = [call for site in program.flow.calls.values() for call in site]
    products = [product for product in map(product_behind, calls) if product is not None]
    for node in program.downstream(products):
        operation = read_affine(node, program.flow) if node not in behind else None
        if operation is None or not operation.mixes:
            continue
        geometry = read_geometry(operation)
        if geometry is None or geometry.kind != "linear" or _why_not(program, model, operation, geometry) is not None:
            continue
        if len(program.flow.parameter_users(operation.weight_name)) == 1:
            yield _map_at(program, finder, operation)


def _holds_weights(program: Program, finder: AimFinder, node: Node) -> bool:
    """Whether an operation that mixes channels takes a parameter, or a value computed from one (weight norm)."""
    name = operation_name(node)
    # An operation of a library's own (the experts of transformers) with weights can be anything.
    foreign = getattr(node.target, "namespace", "aten") not in ("aten", "prims")
    if not (foreign or name in _PRODUCTS or name in _OTHER_LAYERS or name.startswith("conv")):
        return False
    fixed = [operand for operand in node.all_input_nodes if not finder.varies(operand)]
    return any(program.flow.parameter(source) is not None for operand in fixed for source in upstream(operand))


def _map_beside(program: Program, finder: AimFinder, user: Node, node: Node) -> Node | None:
    """The linear map whose output is the other term of a sum, through operations that keep channels apart."""
    if operation_name(user) not in ("add", "sub") or shape_of(user) != shape_of(node):
        return None
    others = [operand for operand in user.args[:2] if isinstance(operand, Node) and operand is not node]
    current = others[0] if others else None
    if current is not None and shape_of(current) != shape_of(user):
        return None  # one number for many positions cannot correct the error of each position
    while current is not None and len(users(current)) == 1 and not is_site(current):
        operation = read_affine(current, program.flow)
        if operation is not None and operation.mixes:
            return current
        current = finder.source(current)
    return None


def _as_stored(operation: AffineOperation, flow: DataFlow) -> AffineOperation:
    """The map with the axes of its stored weight, where the weight is used transposed (Falcon's `x @ weight.T`)."""
    views = [operand for operand in operation.node.all_input_nodes if flow.parameter(operand) == operation.weight]
    if operation.is_direct or operation.input_axis is None or not _is_transposition(views[0], flow):
        return operation
    return replace(operation, output_axis=operation.input_axis, input_axis=operation.output_axis, is_direct=True)


def _is_transposition(view: Node, flow: DataFlow) -> bool:
    if len(shape_of(view)) != 2 or not flow.is_direct(view.args[0]):
        return False
    name = operation_name(view)
    if name == "permute":
        return [axis % 2 for axis in view.args[1]] == [1, 0]
    return name in ("t", "numpy_T") or (name == "transpose" and view.args[1] % 2 != view.args[2] % 2)


def _why_not(program: Program, model: nn.Module, operation: AffineOperation, geometry: Geometry | None) -> str | None:
    flow, weight = program.flow, cast(str, operation.weight)
    deciding = sizes_decided_by(operation.node, program.operations)
    if any(is_site(source) for node in deciding for source in upstream(node)):
        return (
            f"{describe(operation.node)} is given as many rows as values behind a gate decide (tokens that are routed "
            "to experts): the two networks may route others"
        )
    takers = flow.parameter_users(weight)
    own = (weight, operation.bias, operation.is_direct, operation.output_axis, geometry)
    alike = [(use.weight, use.bias, use.is_direct, use.output_axis, read_geometry(use)) == own
             for use in _uses(program, operation)]  # fmt: skip
    if sum(alike) < len(takers):
        return f"{weight} is used {len(takers)} times in a forward pass, and not as a plain map each time"
    if flow.is_tied(weight):
        return f"{weight} is tied: several modules hold it or its memory, here {describe(operation.node)} uses it"
    if not operation.is_direct:
        return f"{weight} is used through a view, transposed or cut"
    if geometry is None:
        return f"{describe(operation.node)} is no linear layer or convolution that is refitted here"
    if not model.get_parameter(weight).is_floating_point():
        return f"{weight} is quantized"
    return None


def _bias(program: Program, operation: AffineOperation, aim: Aim) -> Bias | None:
    """The bias of the map, or the bias of a BatchNorm behind the map; used as often as the map's weight."""
    norms = None if aim.norm is None else program.flow.parameter(aim.norm.args[2])
    for name, scale in ((operation.bias, aim.scale), (norms, aim.scale_behind_norm)):
        uses = [] if name is None else program.flow.parameter_users(name)
        if name is not None and len(uses) == len(_uses(program, operation)) and not program.flow.is_tied(name):
            return Bias(name, scale)
    return None


def _grouped(maps: Sequence[tuple[LinearMap, set[int]]], others: Mapping[Node, Sequence[LinearMap]]) -> Iterator[Layer]:
    """The maps in layers: maps with the same aim and layout together; grouped, or with `others`, a map alone."""
    together: dict[Any, list[tuple[LinearMap, set[int]]]] = {}
    for entry in maps:
        consumer = entry[0]
        alone = consumer.node if consumer.geometry.groups > 1 or others.get(consumer.node) else None
        key = (consumer.aim.node, shape_of(consumer.node), consumer.operation.channel_axis, consumer.aim.layout)
        together.setdefault((*key, not entry[1], alone), []).append(entry)
    for entries in together.values():
        sites = sorted(set().union(*(sites for _, sites in entries)))
        yield Layer(tuple(consumer for consumer, _ in entries), tuple(sites))
