"""Gates that a traced network (a GraphModule of torch.fx) calls, or spreads over several nodes, as one module each.

sigmoid = sigmoid(x)                       silu = silu(x)      # the module `silu`, nn.SiLU
mul     = x * sigmoid            →
"""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Set

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree
from transformers.activations import ACT2FN

from hf_lgelu.models.copies import independent_copy
from hf_lgelu.networks.calls import CALLED_KINDS
from hf_lgelu.networks.elementwise import FunctionModule, elementwise_values, form_of_values

_FORMULAS = ("gelu", "silu", "mish", "hardswish")
_MOST_NODES = 16  # of one formula


def with_gate_modules(model: nn.Module, kinds: Collection[str] = CALLED_KINDS) -> nn.Module:
    """A copy of the same function in which each gate of a graph is a module; `model` itself if it has no other gates.

    Gates are found by their values: a call of a function of these kinds, and a formula of GELU, SiLU, Mish or Hardswish
    that reads one node several times.
    """
    if not any(True for each in model.modules() if isinstance(each, GraphModule) for _ in _gates(each, kinds)):
        return model
    model = independent_copy(model)
    for module in [each for each in model.modules() if isinstance(each, GraphModule)]:
        for end, source, gate in [*_gates(module, kinds)]:
            module.add_submodule(f"{end.name}_gate", gate.eval())
            with module.graph.inserting_before(end):
                call = module.graph.call_module(f"{end.name}_gate", (source,))
            call.meta = dict(end.meta)
            end.replace_all_uses_with(call)
        module.graph.eliminate_dead_code()
        module.recompile()
    return model


def _gates(module: GraphModule, kinds: Collection[str]) -> Iterator[tuple[Node, Node, nn.Module]]:
    """(the last node of a gate, the node that it is a function of, a module that computes the same) of each gate."""
    place, found = {node: number for number, node in enumerate(module.graph.nodes)}, set[Node]()
    for end in place:
        inside, reads = set[Node](), Counter({end: 1})
        while reads and len(inside) < _MOST_NODES:
            # The latest node joins first, so a node on all paths is at some time the only one that is read.
            latest = max(reads, key=place.__getitem__)
            if latest in found or not _is_operation(module, latest):
                break
            inside.add(latest)
            del reads[latest]
            leaves = pytree.tree_leaves((latest.args, latest.kwargs))
            reads.update(leaf for leaf in leaves if isinstance(leaf, Node) and leaf.op != "get_attr")
            is_formula = sum(reads.values()) > 1
            is_call = latest is end and end.op == "call_function" and len(end.all_input_nodes) == 1
            if len(reads) == 1 and (is_formula or is_call):
                (source,) = reads
                form = form_of_values(elementwise_values(_function(module, inside, source, end)))
                if form is not None and form.kind in kinds and (form.kind in _FORMULAS or not is_formula):
                    options = {name: value for name, value in end.kwargs.items() if name not in ("input", "inplace")}
                    gate = ACT2FN[form.name] if is_formula else FunctionModule(end.target, end.args[1:], options)
                    found.add(end)
                    yield end, source, gate
                    break


def _is_operation(module: GraphModule, node: Node) -> bool:
    """Whether a node can be a part of a formula: it has no weights, and its constants are single numbers."""
    if node.op == "call_module":
        return not any(True for _ in module.get_submodule(str(node.target)).parameters())
    holders = [str(each.target).rpartition(".") for each in node.all_input_nodes if each.op == "get_attr"]
    constants = (getattr(module.get_submodule(owner), name) for owner, _, name in holders)
    return node.op in ("call_function", "call_method") and all(each.numel() == 1 for each in constants)


def _function(module: GraphModule, inside: Set[Node], source: Node, end: Node) -> Callable[[Tensor], Tensor]:
    """The nodes `inside` as a function of `source`, on the CPU."""
    graph = Graph()
    copies = {source: graph.placeholder("x")}
    for node in module.graph.nodes:
        if node in inside or (node.op == "get_attr" and not inside.isdisjoint(node.users)):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[end])
    formula = copy.deepcopy(GraphModule(module, graph)).cpu().eval()

    def function(x: Tensor) -> Tensor:
        images = torch.zeros(2, 3, 2, 2)
        if formula(images).shape != images.shape:  # it is flattened, too
            raise ValueError("the formula gives another shape")
        return formula(x).reshape(x.shape)  # a constant of shape (1, 1, 1) adds axes

    return function
