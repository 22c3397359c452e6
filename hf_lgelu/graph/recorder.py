"""One real forward pass, written down while it runs: each operation of torch as a node of a graph, none in place.

    def forward(self, x):                      x      = placeholder
        x = self.fc1(x)                        linear = linear(x, fc1.weight, fc1.bias)
        x[:, 0] = 0                            fill   = slice_scatter(linear, …)
        return self.fc2(self.act(x))           site   = activation_site(fill, 0)
                                               output = linear(site, fc2.weight, fc2.bias)

The model runs in inference mode: linear maps, convolutions, norms and attention are then seen whole. Each operation
itself runs outside of inference mode, so that a tensor that the model keeps for later is an ordinary one.
"""

import itertools
import math
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, library, nn
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hf_lgelu.networks.elementwise import FunctionModule
from hf_lgelu.networks.run import buffers_restored, evaluation_mode, same_randomness, structure_restored
from hf_lgelu.networks.sites import ActivationSite, exchanged

aten = torch.ops.aten

MARK = "activation_site"


@library.custom_op(f"hf_lgelu::{MARK}", mutates_args=())
def _activation_site(x: Tensor, site: int) -> Tensor:
    return x.clone()  # the recorder runs the gate in its place


def _mark(x: Tensor, site: int) -> Tensor:
    return torch.ops.hf_lgelu.activation_site(x, site)


def run_gate(module: nn.Module, value: Tensor) -> Tensor:
    """The output of a gate. Its hooks do not run: what they do to the output is in the recording."""
    return module.forward(value.clone() if getattr(module, "inplace", False) else value)


# Where the result depends on a generator, the numbers of this run are part of the recording.
_DRAWN_FROM_VALUES = ("bernoulli", "multinomial", "normal", "poisson", "binomial")
_DRAWN = (*_DRAWN_FROM_VALUES, "rand", "uniform", "exponential", "geometric", "cauchy", "log_normal", "_sample")
# The values of a tensor become Python's by these, and no operation shows it.
_TO_PYTHON = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


def _is_sized_by_values(func: Any, args: Any) -> bool:
    """Whether values decide the size of an operation's result: of `nonzero`, of an index by a mask."""
    if torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
        return False
    if func.overloadpacket is not aten.index:
        return True
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


@dataclass(eq=False)
class _Known:
    """The node of a live tensor. A view also has the tensor that it views and the nodes that made it."""

    tensor: weakref.ref
    node: Node
    written: int  # how often its memory had been written when `node` was made
    base: Tensor | None = None
    steps: tuple[Node, ...] = ()  # the view's operation, and the choice among its outputs


class Recorder(TorchDispatchMode):
    """Writes down the operations that run inside, as nodes of `graph`.

    1. `__init__` makes a placeholder of each parameter and buffer (`stored` has their names), `input` of each input.
    2. `__torch_dispatch__` runs each operation and adds its node. An operation in place becomes one that makes a new
       value, and all tensors that share its memory are read anew from this value (`_write`).
    3. A tensor that nobody made is a number of this run: a placeholder with a value in `values`.
    4. `output` ends the graph, without operations that no output needs.
    """

    def __init__(self, model: nn.Module, sites: Sequence[ActivationSite]) -> None:
        super().__init__()
        self.graph = Graph()
        self.stored: dict[Node, str] = {}
        self.inputs: dict[Node, str] = {}
        self.values: dict[Node, Any] = {}
        self.belongs_to_batch = False
        self.decided_from = math.inf
        self.reached: set[int] = set()
        self._sites = sites
        self._reads: list[tuple[Node, int]] = []  # of values by Python, and the number of operations before
        self._deciding: list[Node] = []  # values that decide the size of another value
        self._count = 0
        self._known: dict[int, _Known] = {}
        self._writes: Counter[int] = Counter()  # by address of the memory
        self._stored_at: dict[Any, Node] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            node = self._placeholder("p_" + name)
            self.stored[node] = name
            self._learn(tensor, node)
            self._stored_at.setdefault(_place(tensor), self._known[id(tensor)].node)

    def input(self, tensor: Tensor, name: str) -> None:
        """Add an input of the network."""
        node = self._placeholder(name)
        self.inputs[node] = name
        self._learn(tensor, node)

    def output(self, tensors: Sequence[Tensor]) -> None:
        """End the graph with these outputs, without operations that no output needs.

        A read of values that the inputs decide, or a size that values decide (`nonzero`), makes the recording one of
        only this batch (`belongs_to_batch`): Python may branch on it. What
        runs after a read of values after a gate (`decided_from`, a place in the recording) may not run in a student.
        """
        self.graph.output([self.node(tensor) for tensor in tensors])
        varying, after_gate = {*self.inputs}, set[Node]()
        for node in self.graph.nodes:
            for found in (varying, after_gate):
                if is_site(node) or any(operand in found for operand in node.all_input_nodes):
                    found.add(node)
        deciding = (*self._deciding, *(node for node, _ in self._reads))
        self.belongs_to_batch = any(node in varying for node in deciding)
        self.decided_from = min((place for node, place in self._reads if node in after_gate), default=math.inf)
        for node in reversed(self.graph.nodes):
            if node.op != "output" and not node.users and node not in self.stored and node not in self.inputs:
                self.values.pop(node, None)
                self.graph.erase_node(node)

    def node(self, tensor: Tensor) -> Node:
        """The node of a tensor's present value."""
        known = self._known.get(id(tensor))
        if known is None:
            return self._unknown(tensor)
        if known.base is not None and known.written < self._writes[_memory(tensor)]:  # through another tensor
            node = self.node(known.base)
            for step in known.steps:
                node = self._made(step.target, (node, *step.args[1:]), step.kwargs, like=step)
            known.node, known.written = node, self._writes[_memory(tensor)]
        return known.node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch.inference_mode(False), torch.no_grad():
            if func is torch.ops.hf_lgelu.activation_site.default:
                return self._gate(func, *args)
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if isinstance(func, OpOverload) and func.overloadpacket.__name__.startswith(_DRAWN):
                return self._draw(func, args, kwargs)
            if isinstance(func, OpOverload) and func._schema.is_mutable:
                return self._in_place(func, args, kwargs)
            nodes, named = pytree.tree_map_only(Tensor, self.node, (args, kwargs))
            output = func(*args, **kwargs)
            made = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            if given and _is_sized_by_values(func, args):
                self._deciding.extend(map(self.node, given))
            if not made:
                if given:
                    self.read(given[0])
            elif not all(any(leaf is tensor for tensor in given) for leaf in made):  # else nothing happened
                self._learn_all(output, self._made(func, nodes, named), given)
            return output

    def read(self, tensor: Tensor) -> None:
        """Note that the values of a tensor became Python's (`int(x.max())`): they may decide what follows."""
        self._reads.append((self.node(tensor), self._count))

    def _gate(self, func: Any, x: Tensor, site: int) -> Tensor:
        self.reached.add(site)
        output = run_gate(self._sites[site].module, x)
        self._learn(output, self._made(func, (self.node(x), site), {}), x)
        return output

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Random numbers: both networks get those of this run."""
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if (
            source is not None
            and not func._schema.is_mutable
            and func.overloadpacket.__name__.startswith(_DRAWN_FROM_VALUES)
        ):
            self.read(source)
        output = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                node = self._number(leaf)
                if leaf is source:
                    self._write(leaf, node)
                else:
                    self._learn(leaf, node)
        return output

    def _in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation in place as one that makes new values."""
        arguments = func._schema.arguments
        named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        written = [
            argument.name
            for argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write and named.get(argument.name) is not None
        ]
        nodes = pytree.tree_map_only(Tensor, self.node, named)
        targets = [leaf for name in written for leaf in pytree.tree_leaves(named[name])]
        others = [leaf for leaf in pytree.tree_leaves(named) if isinstance(leaf, Tensor)]
        output = func(*args, **kwargs)
        if (twin := _twin(func, written)) is not None and len({tensor.dtype for tensor in others}) == 1:
            plain = [each.name for each in twin._schema.arguments if not each.kwarg_only and each.name in nodes]
            further = {each.name for each in twin._schema.arguments if each.kwarg_only and each.name in nodes}
            values = [self._made(twin, [nodes[name] for name in plain], {name: nodes[name] for name in further})]
        else:
            every = self._made(on_copies, (func, tuple(written), nodes), {})
            values = [self._made(operator.getitem, (every, place), {}) for place in range(len(targets))]
            rest = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            for place, leaf in enumerate(leaf for leaf in rest if not any(leaf is target for target in targets)):
                self._learn(leaf, self._made(operator.getitem, (every, len(targets) + place), {}), *others)
        for target, value in zip(targets, values, strict=True):
            if target.numel():
                self._write(target, value)
            self._shape(value, target)
        return output

    def _write(self, target: Tensor, value: Node) -> None:
        """Let `value` be what `target` holds from now on, and what all tensors on its memory show a part of."""
        self.node(target)
        known = self._known[id(target)]
        chain = [known]
        while chain[-1].base is not None:
            self.node(chain[-1].base)  # the present value, before it counts as written
            chain.append(self._known[id(chain[-1].base)])
        self._writes[_memory(target)] += 1
        known.node, known.written = value, self._writes[_memory(target)]
        self._shape(value, target)
        for part, whole in itertools.pairwise(chain):
            view, base = part.tensor(), whole.tensor()
            node = self._scattered(whole.node, part.node, part.steps[-1], view, base)
            self._shape(node, base)
            whole.node, whole.written = node, self._writes[_memory(target)]

    def _scattered(self, whole: Node, part: Node, step: Node, view: Any, base: Any) -> Node:
        """The value of a tensor after `part` was written into its view, which `step` made."""
        name = operation_name(step)
        if name in ("select", "slice", "diagonal"):
            twin = getattr(aten, f"{name}_scatter").default
            return self._made(twin, (whole, part, *step.args[1:]), dict(step.kwargs))
        return self._made(with_part, (whole, part, *_layout(base, view)), {})

    def _learn_all(self, output: Any, node: Node, given: Sequence[Tensor]) -> None:
        """Note the outputs of an operation."""
        if isinstance(output, Tensor):
            self._learn(output, node, *given)
            return
        for index, part in enumerate(output):
            if isinstance(part, Tensor):
                self._learn(part, self._made(operator.getitem, (node, index), {}), *given)

    def _learn(self, tensor: Tensor, node: Node, *given: Tensor) -> None:
        """Note the node of a tensor; it is a view if it lies on the memory of one of the tensors `given`."""
        self._shape(node, tensor)
        place, memory = id(tensor), _memory(tensor)
        base = next((each for each in given if memory and _memory(each) == memory and each is not tensor), None)
        steps: tuple[Node, ...] = ()
        if base is not None and node.op == "call_function":
            steps = (node.args[0], node) if node.target is operator.getitem else (node,)
            if steps[0].args[:1] != (self.node(base),):  # no plain view of its first argument
                steps = (self._made(part_of, (self.node(base), *_layout(base, tensor)), {}, like=node),)
        forget = self._known

        def freed(_: Any) -> None:
            forget.pop(place, None)

        self._known[place] = _Known(weakref.ref(tensor, freed), node, self._writes[memory], base, steps)

    def _unknown(self, tensor: Tensor) -> Node:
        """The node of a tensor that no operation made: a parameter in another object (`weight.data`), or a number."""
        node = self._stored_at.get(_place(tensor))
        self._learn(tensor, self._number(tensor) if node is None else node)
        return self._known[id(tensor)].node

    def _number(self, tensor: Tensor) -> Node:
        node = self._placeholder("number")
        self.values[node] = tensor.detach().clone()
        self._shape(node, tensor)
        return node

    def _placeholder(self, name: str) -> Node:
        return self.graph.placeholder("".join(letter if letter.isalnum() else "_" for letter in name))

    def _made(self, target: Callable[..., Any], args: Any, kwargs: Any, like: Node | None = None) -> Node:
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        self._count += 1
        node.meta["place"] = self._count
        if like is not None and "shape" in like.meta:
            node.meta["shape"] = like.meta["shape"]
        return node

    @staticmethod
    def _shape(node: Node, tensor: Tensor) -> None:
        node.meta["shape"] = tuple(tensor.shape)


class _ReadsByPython(TorchFunctionMode):
    """Tells a recorder of the reads that no operation shows."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_PYTHON:
            self._recorder.read(args[0])
        return func(*args, **(kwargs or {}))


def record(
    model: nn.Module, sites: Sequence[ActivationSite], args: Any, kwargs: Any, run: Callable[..., Sequence[Tensor]]
) -> Recorder:
    """The recording of `run(*args, **kwargs)`, which calls `model` and gives the outputs that count.

    The tensors in `args` and `kwargs` are the inputs. Each gate at one of `sites` is a node `activation_site`. The
    model stays as it is.
    """

    recorder = Recorder(model, sites)
    given = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
    for path, leaf in pytree.tree_flatten_with_path(given)[0]:
        if isinstance(leaf, Tensor):
            recorder.input(leaf, _name_of(path))
    markers = [FunctionModule(_mark, (index,)) for index in range(len(sites))]
    is_fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operation for a whole encoder layer
    try:
        with (
            structure_restored(model),
            buffers_restored(model),
            exchanged(sites, markers),
            evaluation_mode(model),
            same_randomness(),
            torch.inference_mode(),
            _ReadsByPython(recorder),
            recorder,
        ):
            outputs = run(*given[0], **given[1])
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise ValueError(
            f"{type(model).__name__} takes a gradient inside its forward pass, as models of forces do, and a recording "
            "cannot follow it. Convert the module that gives the energy"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fused)
    recorder.output(outputs)
    return recorder


def _name_of(path: Sequence[Any]) -> str:
    """The name of an input: its keyword, or "input" and its place."""
    part, *steps = [getattr(step, "key", getattr(step, "idx", getattr(step, "name", ""))) for step in path]
    return "_".join(map(str, steps if part == 1 else ("input", *steps)))


def operation_name(node: Any) -> str:
    """The ATen name of an operation, without overload and the underscore of in-place forms; "" for other nodes."""
    packet = getattr(getattr(node, "target", None), "overloadpacket", None)
    return "" if packet is None else packet.__name__.rstrip("_")


def is_site(node: Node) -> bool:
    """Whether a node is the call of a gate."""
    return operation_name(node) == MARK


def on_copies(func: Any, written: Sequence[str], named: dict[str, Any]) -> list[Tensor]:
    """The written arguments of an operation after it ran on copies of them, and its further outputs."""
    copies = {name: pytree.tree_map_only(Tensor, torch.clone, named[name]) for name in written}
    given = dict(named) | copies
    plain = [each.name for each in func._schema.arguments if not each.kwarg_only and each.name in given]
    positional = [given.pop(name) for name in plain]
    output = func(*positional, **given)
    targets = [leaf for value in copies.values() for leaf in pytree.tree_leaves(value)]
    rest = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return targets + [leaf for leaf in rest if not any(leaf is target for target in targets)]


def part_of(whole: Tensor, strides: Sequence[int], shape: Sequence[int], steps: Sequence[int], offset: int) -> Tensor:
    """The elements of `whole`, laid out in memory with `strides`, that a view of it shows."""
    return (
        torch.empty_strided(whole.shape, strides, dtype=whole.dtype, device=whole.device)
        .copy_(whole)
        .as_strided(shape, steps, offset)
    )


def with_part(
    whole: Tensor, part: Tensor, strides: Sequence[int], shape: Sequence[int], steps: Sequence[int], offset: int
) -> Tensor:
    """`whole` after `part` was written into this view of it."""
    laid = torch.empty_strided(whole.shape, strides, dtype=whole.dtype, device=whole.device).copy_(whole)
    laid.as_strided(shape, steps, offset).copy_(part)
    return laid


def _layout(base: Tensor, view: Tensor) -> tuple[Any, ...]:
    offset = view.storage_offset() - base.storage_offset()
    return list(base.stride()), list(view.shape), list(view.stride()), offset


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have none
        return 0


def _place(tensor: Tensor) -> Any:
    memory = _memory(tensor)
    if not memory:
        return id(tensor)
    return memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _twin(func: Any, written: Sequence[str]) -> Any:
    """The overload that computes the one written argument of `func` without writing; None where there is none."""
    packet = getattr(aten, func.overloadpacket.__name__.rstrip("_"), None)
    if packet is None or len(written) != 1:
        return None
    types = [(each.name, str(each.type)) for each in func._schema.arguments if not each.is_out]
    for overload in packet.overloads():
        twin = getattr(packet, overload)
        alike = [(each.name, str(each.type)) for each in twin._schema.arguments] == types
        if alike and not twin._schema.is_mutable and len(twin._schema.returns) == 1:
            return twin
    return None
