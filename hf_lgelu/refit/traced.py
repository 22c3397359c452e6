"""A traced forward pass that runs in parts, with the weights of the original or of the converted network."""

import operator
import tempfile
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from hf_lgelu.networks.dataflow import (
    OutputsOf,
    all_tensors,
    export_sites,
    is_site,
    operation_name,
    read_flow,
    stored_name,
)
from hf_lgelu.networks.outputs import agree
from hf_lgelu.networks.run import NOT_TAKEN, Inputs, run_example, same_randomness
from hf_lgelu.networks.sites import ActivationSite
from hf_lgelu.refit.folds import FoldBatch

Gate = Callable[[int, Tensor], Tensor]
"""(index of a site, its input) → its output."""


class TracedNetwork:
    """The operations of a forward pass on inputs of one shape, in their order; no operation works in place."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[ActivationSite],
        inputs: Inputs,
        outputs: OutputsOf = all_tensors,
        *,
        any_size: bool = False,
    ) -> None:
        """Trace `model` as `export_sites` does, with its refusal."""
        traced, reached = export_sites(model, sites, inputs, outputs, any_size=any_size)
        if not _can_be_kept(traced):
            traced = traced.run_decompositions({})  # takes longer than the trace itself
            _restore_norms(traced.graph_module.graph)
        self.flow = read_flow(model, traced, reached)
        self._module = traced.graph_module
        self._constants = traced.constants
        placeholders = [node for node in self._module.graph.nodes if node.op == "placeholder"]
        self._specs = dict(zip(placeholders, traced.graph_signature.input_specs, strict=True))
        self.inputs = [node for node, spec in self._specs.items() if spec.kind is InputKind.USER_INPUT]
        self.operations = [node for node in self._module.graph.nodes if node.op in ("call_function", "get_attr")]

    def gives(self, inputs: Inputs, model: nn.Module, gate: Gate) -> list[Tensor]:
        """The outputs for inputs of any shape. Raises one of NOT_TAKEN where the program does not take them."""
        values = self.stored(model)
        device = next((value.device for value in values.values() if isinstance(value, Tensor)), torch.device("cpu"))
        values |= self.bind(inputs, device)
        self.run(self.operations, values, (), gate)
        (output,) = self._module.graph.find_nodes(op="output")
        return [values[node] for node in output.args[0]]

    def name_of(self, node: Node) -> str:
        """The model's name of the parameter or buffer that a placeholder stands for."""
        return stored_name(self._specs[node].target)

    def bind(self, inputs: Inputs, device: torch.device) -> dict[Node, Any]:
        """{placeholder: value} of a batch of the traced shape, on `device`."""
        leaves = pytree.tree_leaves(pytree.tree_map_only(Tensor, lambda value: value.to(device), inputs))
        return dict(zip(self.inputs, leaves, strict=True))

    def stored(self, model: nn.Module) -> dict[Node, Any]:
        """{placeholder: value}: the parameters and buffers of `model`, and the constants of the trace."""
        found: dict[Node, Any] = {}
        for node, spec in self._specs.items():
            if spec.kind is InputKind.PARAMETER:
                found[node] = model.get_parameter(stored_name(spec.target))
            elif spec.kind is InputKind.BUFFER and spec.target not in self._constants:
                found[node] = model.get_buffer(stored_name(spec.target))
            elif spec.kind is not InputKind.USER_INPUT:
                found[node] = self._constants[spec.target]
        return found

    def downstream(self, starts: Iterable[Node], within: set[Node] | None = None) -> set[Node]:
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
        values = self.stored(model)

        def constant(node: Node) -> Any:
            if node not in values:
                for operand in node.all_input_nodes:
                    constant(operand)
                self.run([node], values, (), lambda site, value: value)
            return values[node]

        return constant

    def run(self, nodes: Iterable[Node], values: dict[Node, Any], known: Sequence[dict[Node, Any]], gate: Gate) -> None:
        """Execute `nodes` in their order; results go into `values`, operands come from there or from `known`."""
        value = ChainMap(values, *known).__getitem__
        for node in nodes:
            if node.op == "get_attr":
                values[node] = operator.attrgetter(node.target)(self._module)
            elif is_site(node):
                values[node] = gate(node.args[1], value(node.args[0]))
            else:
                values[node] = node.target(*map_arg(node.args, value), **map_arg(node.kwargs, value))


def gate_of(modules: Sequence[nn.Module]) -> Gate:
    """The gate that runs the module of each site."""

    def run(site: int, value: Tensor) -> Tensor:
        module = modules[site]
        # forward, not the call: the trace already holds what hooks do to the output.
        return module.forward(value.clone() if getattr(module, "inplace", False) else value)

    return run


def _can_be_kept(traced: ExportedProgram) -> bool:
    """Whether no operation works in place, moves a norm's running statistics, or wraps operations that may."""
    for node in traced.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool):  # arithmetic with sizes
            continue
        in_place = not isinstance(node.target, OpOverload) or node.target._schema.is_mutable
        if in_place or (operation_name(node) in ("batch_norm", "instance_norm") and node.args[5]):
            return False
    return True


def _restore_norms(graph: Graph) -> None:
    """Put `batch_norm` back in the place of the operation with several outputs that it was decomposed into."""
    decomposed = torch.ops.aten._native_batch_norm_legit_no_training.default
    for parts in graph.find_nodes(op="call_function", target=decomposed):
        output = next(user for user in parts.users if user.args[1] == 0)
        arguments = (*parts.args[:5], False, *parts.args[5:], True)
        with graph.inserting_before(parts):
            norm = graph.call_function(torch.ops.aten.batch_norm.default, arguments)
        norm.meta = output.meta
        output.replace_all_uses_with(norm)


class TracedNetworks:
    """The traced forward passes of a model, one for each shape of inputs: a trace takes longer than running a batch."""

    def __init__(self, model: nn.Module, sites: Sequence[ActivationSite], outputs: OutputsOf = all_tensors) -> None:
        """As for `TracedNetwork`; `sites` are those of `model`."""
        self.model, self.sites, self._outputs = model, sites, outputs
        self._traced: dict[Any, TracedNetwork] = {}

    def of(self, batch: FoldBatch) -> TracedNetwork:
        """The program for inputs of the batch's shape."""
        if batch.shape not in self._traced:
            self._traced[batch.shape] = self._trace(batch.load().inputs, any_size=batch.samples.are_batches)
        return self._traced[batch.shape]

    def _trace(self, inputs: Inputs, any_size: bool) -> TracedNetwork:
        """A trace for the inputs: with `any_size` an earlier one that gives the model's outputs, else a new one."""
        if any_size:
            wanted, gate = self._outputs(run_example(self.model, inputs)), gate_of([site.module for site in self.sites])
            for traced in dict.fromkeys(self._traced.values()):
                with suppress(*NOT_TAKEN), torch.no_grad(), same_randomness():
                    if agree(wanted, traced.gives(inputs, self.model, gate)):
                        return traced
            with suppress(ValueError):
                return TracedNetwork(self.model, self.sites, inputs, self._outputs, any_size=True)
        return TracedNetwork(self.model, self.sites, inputs, self._outputs)


def upstream(node: Node) -> set[Node]:
    """A node and all nodes that it is computed from."""
    found, waiting = {node}, [node]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand not in found:
                found.add(operand)
                waiting.append(operand)
    return found


@dataclass(frozen=True)
class Stage:
    """The operations between the aims of two successive layers, and the values that later stages use."""

    before: tuple[Node, ...]  # up to the inputs of the layer's maps
    after: tuple[Node, ...]  # from the maps to the layer's aim
    original: frozenset[Node]  # the original's values that are used later
    converted: frozenset[Node]  # the converted network's; `after` runs again with the refitted weights


def plan_stages(
    traced: TracedNetwork, stops: Sequence[tuple[Sequence[Node], Sequence[Node]]], kept: Set[Node]
) -> list[Stage]:
    """The stages of a forward pass that stops at each layer: (its maps, whose weights will change, and its aims).

    Inputs in `kept` are available in all stages.
    """
    done: set[Node] = set()
    parts: list[tuple[tuple[Node, ...], tuple[Node, ...]]] = []
    for maps, aims in stops:
        needed_for = set().union(*map(upstream, aims))
        starts = set(maps)  # and the views through which they take their weights
        for view in (operand for each in maps for operand in each.all_input_nodes):
            while view.op != "placeholder" and traced.flow.parameter(view) is not None:
                starts.add(view)
                view = view.args[0]
        changing = traced.downstream(starts, needed_for | done)  # `done`, too: a map may be used early and late
        parts.append((traced.in_order(needed_for - done - changing), traced.in_order(changing)))
        done |= needed_for
    later = set(kept)
    stages: list[Stage] = []
    for before, after in reversed(parts):
        first, again = ({operand for node in nodes for operand in node.all_input_nodes} for nodes in (before, after))
        stages.append(Stage(before, after, frozenset(later), frozenset((later | again) - {*after})))
        later |= first | again
    return stages[::-1]


class KeptValues:
    """The values of each batch between two stages: in memory up to a limit (bytes), the rest on disk."""

    def __init__(self, memory_limit: int) -> None:
        self._left = memory_limit
        self._kept: dict[Any, tuple[list[Any] | Path, Any, int]] = {}
        self._folder: tempfile.TemporaryDirectory | None = None

    def close(self) -> None:
        """Forget all values, in memory and on disk."""
        self._kept.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def put(self, key: Any, values: Any) -> None:
        """Keep values, in containers of any kind, under a new key."""
        leaves, structure = pytree.tree_flatten(values)
        storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
        size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # views share a storage
        if size <= self._left:
            self._left -= size
            self._kept[key] = leaves, structure, size
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hf_lgelu-")
        path = Path(self._folder.name, f"{len(self._kept)}-{abs(hash(key))}.pt")
        torch.save(leaves, path)
        self._kept[key] = path, structure, 0

    def take(self, key: Any) -> Any:
        """The values under a key, which is free again."""
        leaves, structure, size = self._kept.pop(key)
        self._left += size
        if isinstance(leaves, Path):
            path, leaves = leaves, torch.load(leaves, weights_only=True)
            path.unlink()
        return pytree.tree_unflatten(leaves, structure)
