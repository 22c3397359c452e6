"""Recordings of forward passes, which run in parts, with the weights of the original or of the student."""

import inspect
import itertools
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from hf_lgelu.graph.recorder import is_site, operation_name, record, run_gate
from hf_lgelu.networks.run import Inputs, call_with, placed
from hf_lgelu.networks.sites import ActivationSite

OutputsOf = Callable[[Any], list[Tensor]]
"""A model's output → the tensors in it that count."""

Gate = Callable[[int, Tensor], Tensor]
"""(index of a site, its input) → its output."""

# These operations keep the values of a tensor in their order, except for rounding to another dtype.
_IN_ORDER = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"),
        *("alias", "detach", "contiguous", "clone", "_to_copy", "to"),
    )
)
# A number in one of these is no size: programs with other numbers are other programs.
_FIXED_NUMBERS = ("permute", "transpose", "mul", "div", "add", "sub", "batch_norm")


def all_tensors(output: Any) -> list[Tensor]:
    """Every tensor in a model's output, also codes and masks, so that none counts as unused."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


class Recording:
    """The operations of a forward pass in their order, none of which works in place.

    `calls` maps the index of a site to its calls, in order. A site that no output depends on is missing in `calls`, but
    may be among the sites `reached`. `stored` maps placeholders to names of parameters and buffers; a tied parameter
    has the first of its names. A parameter is in `tied` if several modules hold it or its memory. One of these modules
    may not have run. `values` are the tensors that came from Python, and the sizes in which other batches differ.
    """

    def __init__(
        self, model: nn.Module, sites: Sequence[ActivationSite], inputs: Inputs, outputs: OutputsOf = all_tensors
    ) -> None:
        """Record `model` on inputs. Raises the model's own error where it does not take them."""
        given = placed(inputs, model)
        args = () if isinstance(given, dict) else (given,) if isinstance(given, Tensor) else given
        kwargs = given if isinstance(given, dict) else {}
        # A language model of transformers would make a cache.
        options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

        def run(*args: Any, **kwargs: Any) -> list[Tensor]:
            return outputs(call_with(model, args or kwargs, **options))

        recorder = record(model, sites, args, kwargs, run)
        self.graph, self.reached = recorder.graph, frozenset(recorder.reached)
        self.belongs_to_batch, self.decided_from = recorder.belongs_to_batch, recorder.decided_from
        self.inputs, self.values = recorder.inputs, recorder.values
        self._names = {node: name for node, name in recorder.stored.items() if node.users}
        self.operations = [node for node in self.graph.nodes if node.op == "call_function"]
        self.calls: dict[int, list[Node]] = {}
        for node in filter(is_site, self.operations):
            self.calls.setdefault(node.args[1], []).append(node)
        first: dict[int, str] = {}
        holders: dict[str, set[int]] = {}
        for module_name, module in model.named_modules():
            for attribute, tensor in (
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            ):
                name = first.setdefault(id(tensor), f"{module_name}.{attribute}" if module_name else attribute)
                holders.setdefault(name, set()).add(id(module))
        self.in_shared_memory = names_in_shared_memory(model)
        self.tied = {name for name, modules in holders.items() if len(modules) > 1} | self.in_shared_memory
        parameters, saved = dict(model.named_parameters()), model.state_dict(keep_vars=True)
        self._parameters = {node for node, name in self._names.items() if name in parameters}
        self.stored = {
            node: name
            for node, name in self._names.items()
            if node in self._parameters or (name in saved and saved[name].is_floating_point())
        }

    def join(self, other: "Recording") -> dict[Node, Any] | None:
        """Let this recording also stand for another of the same operations; None where it has other operations.

        Returns the other's numbers by nodes of this graph. A size in which the two differ becomes a node here, with its
        present value in `values`.
        """
        if len(self.operations) != len(other.operations) or self.decided_from != other.decided_from:
            return None
        (end,), (other_end,) = (each.graph.find_nodes(op="output") for each in (self, other))
        twins: dict[Node, Node] = {}  # node of `other` → node of this graph
        numbers: dict[Node, Any] = {}
        sizes: list[tuple[Node, int, int]] = []  # the node, the place among its arguments, the number there
        for mine, theirs in zip((*self.operations, end), (*other.operations, other_end), strict=True):
            (leaves, form), (others, other_form) = (
                pytree.tree_flatten((each.args, each.kwargs)) for each in (mine, theirs)
            )
            if mine.target != theirs.target or form != other_form:
                return None
            for place, (leaf, another) in enumerate(zip(leaves, others, strict=True)):
                if isinstance(another, Node) and another.op != "placeholder":
                    is_same = twins.get(another) is leaf
                elif isinstance(leaf, Node) and leaf in self.values:
                    numbers[leaf] = other.values.get(another) if isinstance(another, Node) else another
                    is_same = not isinstance(another, Node) or another in other.values
                elif isinstance(another, Node):
                    is_same = isinstance(leaf, Node) and self._name(leaf) == other._name(another)
                else:
                    is_same = leaf == another
                    if (
                        not is_same
                        and type(leaf) is type(another) is int
                        and operation_name(mine) not in _FIXED_NUMBERS
                    ):
                        sizes.append((mine, place, another))
                        is_same = True
                if not is_same:
                    return None
            twins[theirs] = mine
        for node, place, number in sizes:
            leaves, form = pytree.tree_flatten((node.args, node.kwargs))
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                size = self.graph.placeholder("size")
            self.values[size], numbers[size], leaves[place] = leaves[place], number, size
            node.args, node.kwargs = pytree.tree_unflatten(leaves, form)
        return numbers

    def _name(self, placeholder: Node) -> str | None:
        return self._names.get(placeholder, self.inputs.get(placeholder))

    def name_of(self, node: Node) -> str:
        """The model's name of the parameter or buffer that a placeholder stands for."""
        return self._names[node]

    def bind(self, inputs: Inputs, device: torch.device) -> dict[Node, Any]:
        """{placeholder: value} of a batch of the recorded shape, on `device`."""
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        return {node: leaf.to(device) for node, leaf in zip(self.inputs, leaves, strict=True)}

    def weights(self, model: nn.Module) -> dict[Node, Any]:
        """{placeholder: value}: the parameters and buffers of `model`."""
        held = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
        return {node: held[name] for node, name in self._names.items()}

    def stored_value(self, node: Any, *, or_buffer: bool = False) -> "StoredValue | None":
        """`node` as a function of a parameter, or also of a saved buffer; None for all other nodes."""
        if not isinstance(node, Node):
            return None
        path = [node]
        while inverse_of(path[-1]) is not None:
            path.append(path[-1].args[0])
        is_set = path[-1] in (self.stored if or_buffer else self._parameters)
        return StoredValue(self.stored[path[-1]], tuple(path[:-1])) if is_set else None

    def parameter(self, node: Any) -> str | None:
        """The name of the parameter that `node` is or is a function of (`stored_value`); None for all other nodes."""
        stored = self.stored_value(node)
        return None if stored is None else stored.name

    def parameter_users(self, name: str) -> list[Node]:
        """Every operation that takes the parameter or buffer, itself or a function of it (`StoredValue`)."""
        return [user for node, stored in self.stored.items() if stored == name for user in self._through_views(node)]

    def are_used_once(self, *names: str) -> bool:
        """Whether one operation takes each of these parameters, and one module holds it."""
        return all(len(self.parameter_users(name)) == 1 and name not in self.tied for name in names)

    def _through_views(self, node: Node) -> Iterator[Node]:
        for user in node.users:
            if inverse_of(user) is not None:
                yield from self._through_views(user)
            else:
                yield user

    def downstream(self, starts: Iterable[Node], within: Set[Node] | None = None) -> set[Node]:
        """`starts` and the operations (of `within`, where given) that depend on them."""
        found = set(starts)
        for node in self.operations:
            if (within is None or node in within) and any(operand in found for operand in node.all_input_nodes):
                found.add(node)
        return found

    def in_order(self, nodes: Set[Node]) -> tuple[Node, ...]:
        """The operations among `nodes`, in their order."""
        return tuple(node for node in self.operations if node in nodes)

    def constants(self, model: nn.Module) -> Callable[[Node], Any]:
        """A function that gives the value of a node that does not depend on the inputs."""
        values = self.weights(model)

        def constant(node: Node) -> Any:
            if node not in values and node not in self.values:
                for operand in node.all_input_nodes:
                    constant(operand)
                with torch.no_grad():
                    self.run([node], values, {}, {}, lambda site, value: value)
            return values[node] if node in values else self.values[node]

        return constant

    def run(
        self,
        nodes: Iterable[Node],
        values: MutableMapping[Node, Any],
        numbers: dict[Node, Any],
        weights: dict[Node, Any],
        gate: Gate,
    ) -> None:
        """Execute `nodes` in their order; results go into `values`, where operands come from too.

        `numbers` are those of the batch (`Recordings.numbers_of`), `weights` those of a network.
        """
        value = ChainMap(values, weights, numbers, self.values).__getitem__
        for node in nodes:
            if is_site(node):
                values[node] = gate(node.args[1], value(node.args[0]))
            else:
                values[node] = node.target(*map_arg(node.args, value), **map_arg(node.kwargs, value))


class Recordings:
    """A model's recordings: one for each shape of inputs, or for each batch where Python read values of the inputs.

    Recordings of the same operations are one (`Recording.join`), with numbers in which the batches differ.
    """

    def __init__(self, model: nn.Module, sites: Sequence[ActivationSite], outputs: OutputsOf = all_tensors) -> None:
        """As for `Recording`; `sites` are those of `model`."""
        self.model, self.sites, self.outputs = model, sites, outputs
        self._known: dict[Any, tuple[Recording, dict[Node, Any]]] = {}

    def of(self, batch: Any) -> Recording:
        """The recording for a batch of `Folds`."""
        return self._at(batch)[0]

    def numbers_of(self, batch: Any) -> dict[Node, Any]:
        """{node: value} of the batch, for the nodes that have another value in the batch that was recorded first."""
        return self._at(batch)[1]

    def _at(self, batch: Any) -> tuple[Recording, dict[Node, Any]]:
        own = (batch.shape, batch.numbers)
        for key in (batch.shape, own):
            if key in self._known:
                return self._known[key]
        recording, numbers = Recording(self.model, self.sites, batch.load().inputs, self.outputs), dict[Node, Any]()
        key = own if recording.belongs_to_batch else batch.shape
        for earlier in dict.fromkeys(known for known, _ in self._known.values()):
            found = earlier.join(recording)
            if found is not None:
                recording, numbers = earlier, found
                break
        self._known[key] = recording, numbers
        return recording, numbers


def gates_of(modules: Sequence[nn.Module]) -> Gate:
    """The gate that runs the module of each site."""
    return lambda site, value: run_gate(modules[site], value)


@dataclass(frozen=True)
class StoredValue:
    """A value that a parameter or buffer sets freely: itself, or moved, in another dtype, times a number.

    `views` has the operations that make the value of the tensor called `name`, the last one first.
    """

    name: str
    views: tuple[Node, ...] = ()

    def read(self, model: nn.Module) -> Tensor:
        """The value in a model; where nothing is computed, the stored tensor itself."""
        value = attrgetter(self.name)(model).detach()
        for node in reversed(self.views):
            value = node.target(value, *node.args[1:], **node.kwargs)
        return value

    @torch.no_grad()
    def write(self, model: nn.Module, value: Tensor) -> None:
        """Set the stored tensor so that it gives `value`, which may have another dtype or device."""
        for node in self.views:
            value = cast(Callable[[Tensor], Tensor], inverse_of(node))(value)
        attrgetter(self.name)(model).copy_(value)


def inverse_of(node: Node) -> Callable[[Tensor], Tensor] | None:
    """The inverse of a move, a copy or a product with a number, the node's first operand; None for other nodes."""
    name, rest = operation_name(node), node.args[1:]
    if name in _IN_ORDER:
        return lambda value: value.reshape(node.all_input_nodes[0].meta["shape"])
    if name in ("t", "numpy_T") and len(node.meta["shape"]) == 2:
        return lambda value: value.T
    if name == "transpose":
        return lambda value: value.transpose(*rest)
    if name == "permute":
        order = [axis % len(rest[0]) for axis in rest[0]]
        return lambda value: value.permute([order.index(axis) for axis in range(len(order))])
    if name in ("mul", "div") and not node.kwargs and isinstance(rest[0], int | float) and rest[0]:
        return lambda value: value / rest[0] if name == "mul" else value * rest[0]
    return None


def upstream(node: Node) -> set[Node]:
    """A node and all nodes that it is computed from."""
    found, waiting = {node}, [node]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand not in found:
                found.add(operand)
                waiting.append(operand)
    return found


def names_in_shared_memory(model: nn.Module) -> set[str]:
    """Names of the parameters that overlap another parameter or a buffer (`b.weight.data = a.weight.data.T`)."""
    held: dict[int, list[tuple[str, Tensor, range]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        # Other classes of tensors (quantized, sharded) may have no memory of their own.
        if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and tensor.numel():
            first, bytes_each = tensor.storage_offset(), tensor.element_size()
            last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            place = range(first * bytes_each, (last + 1) * bytes_each)
            held.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor, place))
    return {
        name
        for neighbours in held.values()
        for (name, tensor, place), (_, _, taken) in itertools.permutations(neighbours, 2)
        if isinstance(tensor, nn.Parameter) and place.start < taken.stop and taken.start < place.stop
    }


@dataclass(frozen=True)
class Stage:
    """The operations between the aims of two successive layers, and the values that later stages use."""

    before: tuple[Node, ...]  # up to the inputs of the layer's maps
    after: tuple[Node, ...]  # from the maps to the layer's aim
    original: frozenset[Node]  # the original's values that are used later
    student: frozenset[Node]  # the student's; `after` runs again with the refitted weights


def plan_stages(
    recording: Recording, stops: Sequence[tuple[Sequence[Node], Sequence[Node]]], inputs: Set[Node]
) -> list[Stage]:
    """The stages of a forward pass that stops at each layer: (its maps, whose weights will change, and its aims).

    The values of `inputs` are available in all stages.
    """
    done: set[Node] = set()
    parts: list[tuple[tuple[Node, ...], tuple[Node, ...]]] = []
    for maps, aims in stops:
        needed_for = set().union(*map(upstream, aims))
        starts = set(maps)  # and what computes their weights
        for operand in (operand for each in maps for operand in each.all_input_nodes):
            stored = recording.stored_value(operand, or_buffer=True)
            starts.update(() if stored is None else stored.views)
        changing = recording.downstream(starts, needed_for | done)  # `done`, too: a map may be used early and late
        parts.append((recording.in_order(needed_for - done - changing), recording.in_order(changing)))
        done |= needed_for
    later = set(inputs)
    stages: list[Stage] = []
    for before, after in reversed(parts):
        first, again = ({operand for node in nodes for operand in node.all_input_nodes} for nodes in (before, after))
        stages.append(Stage(before, after, frozenset(later), frozenset((later | again) - {*after})))
        later |= first | again
    return stages[::-1]
