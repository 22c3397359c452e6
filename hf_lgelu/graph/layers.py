"""The linear maps that read the gates' outputs, found in the graph of a forward pass, and reasons against their refit.

A gate's consumers are the first linear maps on every path from its output. Operations between gate and map (dropout,
pooling, a product with the other half of a gated unit, a normalization) run unchanged. Where a path enters a residual
sum, the map on the other side of the sum is a consumer, too: its output can correct the drift on the skip path.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_lgelu.graph.aims import AimFinder, LinearMap
from hf_lgelu.graph.maps import COPIES, RESHAPES, AffineOperation, read_affine, read_geometry, shape_of
from hf_lgelu.graph.recorder import is_site, operation_name
from hf_lgelu.graph.recording import Recording, StoredValue, upstream
from hf_lgelu.networks.sites import ActivationSite

# Operations that mix channels, and may take their weights in a form that is no plain linear layer.
_MIXERS = frozenset(
    (
        *("mm", "bmm", "matmul", "addmm", "baddbmm", "einsum", "linear", "_grouped_mm", "convolution"),
        *("bilinear", "_trilinear", "lstm", "gru", "rnn_tanh", "rnn_relu"),
    )
)

# Operations that take rows of their first argument, and operations that write into places of it.
_CHOICES = frozenset(("index", "index_select", "gather", "take_along_dim"))
_INTO_PLACES = ("index_add", "index_put", "index_copy", "index_reduce", "scatter", "masked_scatter")

NEVER_REACHED = "the inputs never reach this gate"
"""The reason against a refit of what follows a gate that did not run."""

Refused = dict[tuple[str, str], set[int]]
"""{(name, reason): gates before it} of each map, or end of a path, that cannot be refitted."""


@dataclass(frozen=True)
class Layer:
    """The maps that feed one sum and are solved together (most often a single map), and the gates before them.

    The maps may have several uses in a forward pass (one layer for all depths, a head for several sizes): the rows of
    all uses are one least-squares problem. A depthwise map mixes no channels, so each channel is judged alone, and the
    kinks of its gate are chosen with its weights.
    """

    sites: tuple[int, ...]  # the gates; none: the maps are downstream of gated units (`_readers`), or are tied
    uses: tuple[tuple[LinearMap, ...], ...]
    feeds_itself: bool  # whether one use reads the output of another
    depthwise_gate: "FedGate | None"  # the gate of a depthwise map, where nothing else takes its output
    from_gate: tuple[Node, ...]  # from that gate's call to the map's input
    is_tied: bool  # whether other modules hold the weight: only the bias is refitted

    @property
    def maps(self) -> tuple[LinearMap, ...]:
        """The maps at their first use."""
        return self.uses[0]

    @property
    def name(self) -> str:
        """The names of the maps, joined."""
        return " and ".join(consumer.name for consumer in self.maps)

    @property
    def width(self) -> int:
        """The number of features in a row of all maps together."""
        return sum(consumer.width for consumer in self.maps)

    @property
    def has_intercept(self) -> bool:
        """Whether a constant per output channel can be added at one of the maps."""
        return any(consumer.bias is not None for consumer in self.maps)


@dataclass(frozen=True)
class Layers:
    """The layers to refit, in the order of computation, and the maps that cannot be refitted."""

    layers: list[Layer]
    unfit: Refused
    unread: list[int]  # gates that run, but that no compared output depends on
    fed_gates: list["FedGate"]  # the gates whose input is a map's output


def find_layers(recording: Recording, model: nn.Module, sites: Sequence[ActivationSite]) -> Layers:
    """The layers that read the outputs of `sites` in a recording of `model`. They name sites by index."""
    finder = AimFinder(recording, model)
    order = {node: position for position, node in enumerate(recording.operations)}
    refused = cast(Refused, defaultdict(set))
    routed = _routed_nodes(recording)
    reached, unread = _reached_maps(finder, sites, refused)
    maps: list[list[LinearMap]] = []  # the uses of each in a forward pass, in their order
    tied_maps: list[LinearMap] = []
    for node in sorted(reached, key=order.__getitem__):
        if any(node is use.operation.node for uses in maps for use in uses):
            continue
        operation = cast(AffineOperation, read_affine(node, recording))
        reason, weight = _why_not(finder, operation, routed), operation.weight_name
        uses = [] if reason else [finder.find(use) for use in _uses(recording, operation)]
        is_in_one_sum = len({use.aim for use in uses}) < len(uses)  # each use would correct the whole error
        if is_in_one_sum or not all(torch.equal(use.gain, uses[0].gain) for use in uses):
            reason = f"{weight} is used {len(uses)} times in a forward pass, in one sum or with several factors"
        if reason is None:
            maps.append(uses)
            continue
        refused[weight, reason].update(reached[node])
        if weight in recording.tied and not _is_decided(finder, operation, routed):
            tied_maps.append(finder.find(operation))
    maps += [[reader] for reader in _readers(finder, reached, routed)]
    for linear in tied_maps:
        if linear.bias is not None and read_geometry(linear.operation) is not None:
            del reached[linear.operation.node]  # nothing makes up for the gates before: only the bias is refitted
            maps.append([linear])

    fed_gates = find_fed_gates(finder)
    layers = [_layer_of(finder, group, reached, fed_gates) for group in _solved_together(maps, reached)]
    layers.sort(key=lambda layer: max(order[use[0].aim] for use in layer.uses))
    return Layers(layers, refused, unread, fed_gates)


def _reached_maps(
    finder: AimFinder, sites: Sequence[ActivationSite], refused: Refused
) -> tuple[dict[Node, set[int]], list[int]]:
    """({operation of a map: the gates before it}, the gates that no compared output depends on)."""
    # A map whose aim is after a sum can correct the drift of the sum's other term.
    correcting: dict[Node, list[Node]] = defaultdict(list)
    for node in finder.recording.operations:
        operation = read_affine(node, finder.recording)
        if operation is not None and operation.mixes:
            for later in finder.find(operation).to_aim:
                correcting[later].append(node)
    reached: dict[Node, set[int]] = defaultdict(set)
    unread = []
    for index, site in enumerate(sites):
        calls = finder.recording.calls.get(index, [])
        if not calls and index in finder.recording.reached:
            unread.append(index)
        elif not calls:
            refused[site.name, NEVER_REACHED].add(index)
        for call in calls:
            for consumer in _consumers(finder, call, correcting, refused, index, site.name):
                reached[consumer].add(index)
    return reached, unread


def last_biases(recording: Recording, layers: Sequence[Layer]) -> list[str]:
    """The biases of the maps that end the network: no other map and no gate comes after them."""

    def is_last(use: LinearMap) -> bool:
        after = recording.downstream([use.operation.node]) - {use.operation.node}
        affine = (read_affine(node, recording) for node in after)
        return not any(map(is_site, after)) and not any(each.mixes for each in affine if each is not None)

    maps = (use for layer in layers for use in layer.maps)
    return list(dict.fromkeys(use.bias.name for use in maps if use.bias is not None and is_last(use)))


def _solved_together(
    maps: Sequence[list[LinearMap]], reached: Mapping[Node, set[int]]
) -> Iterable[list[list[LinearMap]]]:
    """The maps in groups of one aim and one layout, a group per layer; a grouped or shared map is a group by itself."""
    groups: dict[Any, list[list[LinearMap]]] = defaultdict(list)
    for uses in maps:
        first, is_alone = uses[0], uses[0].geometry.groups > 1 or len(uses) > 1
        node, has_gates = first.operation.node, any(use.operation.node in reached for use in uses)
        alone = node if is_alone else None
        groups[first.aim, shape_of(node), first.operation.channel_axis, first.layout, has_gates, alone].append(uses)
    return groups.values()


def _layer_of(
    finder: AimFinder,
    group: Sequence[list[LinearMap]],
    reached: Mapping[Node, set[int]],
    fed_gates: Sequence["FedGate"],
) -> Layer:
    first, *further = group[0]  # a map with further uses is alone
    written = finder.recording.downstream(use.operation.node for use in group[0]) if further else ()
    path = () if further else _path_from_gate(first, finder)
    fed = next((fed for fed in fed_gates if path and fed.call is path[0]), None)
    if fed is not None and (fed.before.bias is None or fed.before.channel_axis != first.operation.channel_axis):
        fed = None
    return Layer(
        sites=tuple(sorted(set().union(*(reached.get(use.operation.node, ()) for uses in group for use in uses)))),
        uses=(tuple(uses[0] for uses in group), *((use,) for use in further)),
        feeds_itself=any(use.operation.data in written for use in further),
        depthwise_gate=fed,
        from_gate=path,
        is_tied=first.operation.weight_name in finder.recording.tied,
    )


def gates_before(recording: Recording, consumer: LinearMap) -> list[Node]:
    """The gates from which a map takes its input, with no other map in between."""
    data = consumer.operation.data
    gates, waiting, seen = list[Node](), [data], {data}
    while waiting:
        node = waiting.pop()
        operation = None if is_site(node) else read_affine(node, recording)
        if is_site(node):
            gates.append(node)
        elif operation is None or not operation.mixes:
            waiting += set(node.all_input_nodes) - seen
            seen.update(node.all_input_nodes)
    return gates


def _uses(recording: Recording, operation: AffineOperation) -> list[AffineOperation]:
    """The operations that take the weight of a map, in their order; all are affine (see `_why_not`)."""
    takers = set(recording.parameter_users(operation.weight_name))
    found = (read_affine(node, recording) for node in recording.operations if node in takers)
    return [each for each in found if each is not None]


def _path_from_gate(consumer: LinearMap, finder: AimFinder) -> tuple[Node, ...]:
    """The operations from a plain gate to the depthwise map that alone reads it, the gate first; () for other maps.

    They keep channels apart: views, copies, sums and products with constants.
    """
    data = consumer.operation.data
    if consumer.geometry.groups == 1 or consumer.width != math.prod(consumer.geometry.kernel):
        return ()
    path = [data]
    while not is_site(path[-1]):
        node = path[-1]
        before = node.args[0] if operation_name(node) in COPIES | RESHAPES else finder.moved_by_constant(node)
        if before is None:
            return ()
        path.append(before)
    is_alone = all(len(node.users) == 1 for node in path) and shape_of(path[-1]) == shape_of(data)
    return tuple(reversed(path)) if is_alone else ()


def _consumers(
    finder: AimFinder, call: Node, correcting: Mapping[Node, list[Node]], refused: Refused, site: int, gate: str
) -> Iterator[Node]:
    """The linear maps on the paths from a gate's output; a path without a map is noted in `refused`."""
    waiting, seen = [call], {call}
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            operation = read_affine(user, finder.recording)
            if operation is not None and operation.mixes and operation.data is node:
                yield user
            elif user.op == "output":
                reason = "its output is the model's, and no linear map with weights comes after it (`outputs` chooses)"
                refused[gate, reason].add(site)
            elif (weight := _weight_of(finder, user)) is not None:
                reason = f"{operation_name(user)} takes {weight} in a form that is no plain linear layer"
                refused[weight, reason].add(site)
            elif operation_name(user) in ("add", "sub") and user in correcting and shape_of(user) == shape_of(node):
                yield from correcting[user]
            else:
                waiting.append(user)


def _readers(finder: AimFinder, after: Collection[Node], routed: Collection[Node]) -> Iterator[LinearMap]:
    """The linear maps downstream of a gated unit that are not the first ones after a gate: q, k, v, o, gate, up.

    A gated unit is φ(g)·u, and ReLU(g) is near φ(g) - b with a constant b. The part b·u, which no ReLU carries, is
    linear in the block's input, and so partly linear in the inputs of later maps.
    """
    calls = [call for site in finder.recording.calls.values() for call in site]
    products = [product for product in map(product_behind, calls) if product is not None]
    for node in finder.recording.downstream(products):
        operation = read_affine(node, finder.recording) if node not in after else None
        if operation is None or not operation.mixes or _why_not(finder, operation, routed):
            continue
        is_alone = len(finder.recording.parameter_users(operation.weight_name)) == 1
        if is_alone and finder.find(operation).geometry.kind == "linear":
            yield finder.find(operation)


def _weight_of(finder: AimFinder, node: Node) -> str | None:
    """The parameter that an operation which mixes channels takes, or a value computed from one (a mask); else None."""
    name = operation_name(node)
    # A library's own operation with weights (the experts of transformers) can compute anything.
    foreign = getattr(node.target, "namespace", "aten") not in ("aten", "prims")
    if not (foreign or name in _MIXERS or name.startswith("conv")):
        return None
    sources = (list(views_back(operand))[-1] for operand in node.all_input_nodes)
    chosen = [source.args[0] for source in sources if operation_name(source) == "index"]  # each token's own expert
    fixed = [operand for operand in (*node.all_input_nodes, *chosen) if not finder.varies(operand)]
    names = (finder.recording.parameter(source) for operand in fixed for source in upstream(operand))
    return max(sorted(filter(None, names)), key=lambda name: "weight" in name, default=None)


def _why_not(finder: AimFinder, operation: AffineOperation, routed: Collection[Node]) -> str | None:
    """The reason why a map cannot be refitted, or None."""
    weight, geometry, uses = operation.weight_name, read_geometry(operation), _uses(finder.recording, operation)
    if _is_decided(finder, operation, routed):
        return (
            f"values after a gate decide what {weight} is multiplied with (tokens that are routed to experts, "
            "lengths; in float16 a look for infinities, so convert model.float() and save its half()): the student may "
            "decide otherwise"
        )
    if weight in finder.recording.tied:
        return f"{weight} is tied: several modules hold it or its memory"
    takers = finder.recording.parameter_users(weight)
    own = (_made_of(operation.weight), _made_of(operation.bias), operation.output_axis, geometry)
    alike = [(_made_of(use.weight), _made_of(use.bias), use.output_axis, read_geometry(use)) == own for use in uses]
    if sum(alike) < len(takers):
        return f"{weight} is used {len(takers)} times in a forward pass, and not as a plain map each time"
    if geometry is None:
        return f"{operation_name(operation.node)} with {weight} is no linear layer or convolution that is refitted here"
    return None


def _is_decided(finder: AimFinder, operation: AffineOperation, routed: Collection[Node]) -> bool:
    """Whether values after a gate decide what a map is given."""
    aims = [finder.find(use).aim for use in _uses(finder.recording, operation) if use.mixes]
    return operation.node in routed or any(aim.meta.get("place", 0) > finder.recording.decided_from for aim in aims)


def _made_of(stored: StoredValue | None) -> Any:
    """A key of a value's computation, the same for each use."""
    return stored and (stored.name, [(node.target, node.args[1:], node.kwargs) for node in stored.views])


def _routed_nodes(recording: Recording) -> set[Node]:
    """The nodes whose rows are chosen by values after a gate: those of original and student are not the same rows."""
    after_gate = recording.downstream(filter(is_site, recording.operations))
    routed: set[Node] = set()
    for node in recording.operations:
        data, *others = node.all_input_nodes or [None]
        if operation_name(node) in _CHOICES:
            is_routed = not after_gate.isdisjoint(others)
        else:  # as many rows as values say
            is_routed = torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()) and data in after_gate
        kept_in_place = operation_name(node).startswith(_INTO_PLACES)
        if is_routed or any(operand in routed for operand in ([data] if kept_in_place else node.all_input_nodes)):
            routed.add(node)
    return routed


@dataclass(frozen=True)
class FedGate:
    """A gate, the operation that makes its input, and the other half of a gated unit, or None.

    The gate's input is factor · output + offset, with constants per channel.
    """

    site: int
    call: Node
    before: AffineOperation
    other: AffineOperation | None
    owns_other: bool = False  # whether nothing else uses the other half's parameters
    factor: Tensor = field(default_factory=lambda: torch.ones(1, dtype=torch.float64))
    offset: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    @property
    def maps(self) -> tuple[AffineOperation, ...]:
        """The maps of the unit: before the gate, and the other half where the unit owns it."""
        return (self.before, self.other) if self.other is not None and self.owns_other else (self.before,)

    @property
    def is_next(self) -> bool:
        """Whether the gate takes the output as it is."""
        return bool((self.factor == 1).all() and (self.offset == 0).all())


def find_fed_gates(finder: AimFinder) -> list[FedGate]:
    """The gates whose input is the output of an affine map with parameters of its own, by site."""
    fed_gates, used_once = list[FedGate](), finder.recording.are_used_once
    for site, calls in sorted(finder.recording.calls.items()):
        before, between = _source_of(finder, calls[0]) if len(calls) == 1 else (None, [])
        if before is None or not used_once(*before.parameters):
            continue
        moved = finder.between(before, between) if between else ()
        if moved is None:
            continue
        other = _other_half(finder.recording, calls[0])
        # The weight must be that of a module that computes nothing else: hooks then see the values. A block that
        # multiplies by parameters of its own does not call them "weight".
        if not all(each is None or each.weight_name.rpartition(".")[2] == "weight" for each in (before, other)):
            continue
        owns_other = other is not None and used_once(*other.parameters)
        fed_gates.append(FedGate(site, calls[0], before, other, owns_other, *moved))
    return fed_gates


def _source_of(finder: AimFinder, call: Node) -> tuple[AffineOperation | None, list[Node]]:
    """(the affine map before a gate, the sums and products with constants between them, the last one first)."""
    node, user, between = call.args[0], call, list[Node]()
    while True:
        before = affine_source(finder.recording, node, user)
        if before is not None and before.weight is not None:
            return (None if between and before.bias is None else before), between
        data = finder.moved_by_constant(node)
        if data is None or list(node.users) != [user]:
            return None, between
        between.append(node)
        node, user = data, node


def affine_source(recording: Recording, node: Node, user: Node) -> AffineOperation | None:
    """The affine operation whose output only `user` takes, perhaps through reshapes that keep the last axis."""
    is_reshaped = False
    while list(node.users) == [user]:
        operation = read_affine(node, recording)
        if operation is not None:
            if operation.channel_axis is not None:
                return None if is_reshaped and operation.channel_axis != -1 else operation
            # A weight with a number for each channel, unlike that of a LayerNorm over several axes.
            scales = [each for each in operation.node.all_input_nodes if recording.parameter(each)]
            return operation if all(shape_of(each) == shape_of(operation.node)[-1:] for each in scales) else None
        name = operation_name(node)
        if name in RESHAPES and shape_of(node)[-1:] == shape_of(node.args[0])[-1:]:
            is_reshaped = True
        elif name not in COPIES:
            return None
        node, user = node.args[0], node
    return None


def _other_half(recording: Recording, call: Node) -> AffineOperation | None:
    """The map whose output is multiplied by the gate's output, or None."""
    product = product_behind(call)
    if product is None:
        return None
    operation = affine_source(recording, other_factor(product, call), product)
    return operation if operation is not None and operation.mixes else None


def other_factor(product: Node, call: Node) -> Node:
    """The factor of a product that is not the gate's output."""
    return next(operand for operand in product.args[:2] if [*views_back(operand, call)][-1] is not call)


def product_behind(call: Node) -> Node | None:
    """The product of a gate's output with another tensor of its shape, if nothing else uses the gate's output."""
    current = call
    while len(current.users) == 1:
        user = next(iter(current.users))
        if operation_name(user) == "mul":
            operands = [operand for operand in user.args[:2] if isinstance(operand, Node)]
            alike = len(operands) == 2 and shape_of(operands[0]) == shape_of(operands[1]) == shape_of(user)
            return user if alike and operands[0] is not operands[1] else None
        if operation_name(user) not in COPIES:
            return None
        current = user
    return None


def views_back(node: Node, source: Node | None = None) -> Iterator[Node]:
    """A node and the nodes that it is a view or a copy of, back to `source` at most."""
    yield node
    while node is not source and operation_name(node) in COPIES | RESHAPES:
        node = node.args[0]
        yield node
