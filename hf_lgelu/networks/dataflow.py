"""The operations around each activation as a graph, read off one forward pass.

Module names do not say which layer feeds an activation. So one trace has a marker, an operation of its own, in the
place of each λ-GELU. `torch.export` then records the ATen operations and the parameters that each of them takes.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, library, nn
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree

from hf_lgelu.networks.elementwise import FunctionModule
from hf_lgelu.networks.run import NOT_TAKEN, Inputs, call_with, evaluation_mode, placed, run_example, same_randomness
from hf_lgelu.networks.sites import ActivationSite, exchanged

COPIES = frozenset(("clone", "contiguous", "alias", "detach", "_to_copy", "to", "dropout"))
"""In eval mode these operations keep every value in its place, except for rounding to another dtype."""

RESHAPES = frozenset(("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"))
"""These operations keep the order of the elements."""

CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))

# Operations that read a tensor's shape or dtype, and not its values.
_BOOKKEEPING = frozenset(("_assert_tensor_metadata", "_assert_scalar", "sym_size", "sym_stride", "sym_numel"))
# The output of one of these on a weight is still the parameter, in another layout.
_WEIGHT_VIEWS = frozenset(("t", "numpy_T", "transpose", "permute", "view", "reshape", "alias", "detach", "contiguous"))
_MARK = "activation_site"
_WRAPPED = "model."

_UNKNOWN = 8191

OutputsOf = Callable[[Any], list[Tensor]]
"""A model's output → the tensors in it that count."""


def all_tensors(output: Any) -> list[Tensor]:
    """Every tensor in a model's output, also codes and masks, so that none counts as unused."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


@library.custom_op(f"hf_lgelu::{_MARK}", mutates_args=())
def _activation_site(x: Tensor, site: int) -> Tensor:
    return x.clone()


@_activation_site.register_fake
def _activation_site_shape(x: Tensor, site: int) -> Tensor:
    return torch.empty_like(x)


class DataFlow:
    """One traced forward pass.

    `calls` maps the index of a site to its calls, in order. A site that no output depends on is missing in `calls`, but
    may be among the sites `reached`. `stored` maps the graph's placeholders to names of `model.named_parameters()`; a
    tied parameter has the first of its names. A parameter is in `tied` if several modules hold it or its memory. One of
    these modules may not have run.
    """

    def __init__(self, model: nn.Module, graph: Graph, names: Mapping[str, str], reached: frozenset[int]) -> None:
        """`names` maps the graph's placeholders to names of parameters; `reached` are the sites that ran."""
        self.reached = reached
        first: dict[int, str] = {}
        holders: dict[str, set[int]] = {}
        for module_name, module in model.named_modules():
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                name = first.setdefault(id(parameter), f"{module_name}.{attribute}" if module_name else attribute)
                holders.setdefault(name, set()).add(id(module))
        self.tied = {name for name, modules in holders.items() if len(modules) > 1} | names_in_shared_memory(model)
        self.stored = {
            node: first[id(model.get_parameter(names[node.name]))]
            for node in graph.nodes
            if node.op == "placeholder" and node.name in names
        }
        self.calls: dict[int, list[Node]] = {}
        for node in graph.nodes:
            if is_site(node):
                self.calls.setdefault(node.args[1], []).append(node)

    def parameter(self, node: Any) -> str | None:
        """The name of the parameter that `node` is or is a view of; None for all other nodes, also buffers."""
        while isinstance(node, Node) and node not in self.stored and operation_name(node) in _WEIGHT_VIEWS:
            node = node.args[0]
        return self.stored.get(node) if isinstance(node, Node) else None

    def parameter_users(self, name: str) -> list[Node]:
        """Every operation that takes the parameter, itself or through a view."""
        return [user for node, stored in self.stored.items() if stored == name for user in self._through_views(node)]

    def are_used_once(self, *names: str) -> bool:
        """Whether one operation takes each of these parameters, and one module holds it."""
        return all(len(self.parameter_users(name)) == 1 and name not in self.tied for name in names)

    def _through_views(self, node: Node) -> Iterator[Node]:
        for user in users(node):
            if operation_name(user) in _WEIGHT_VIEWS:
                yield from self._through_views(user)
            else:
                yield user


def trace_sites(model: nn.Module, sites: Sequence[ActivationSite], inputs: Inputs) -> DataFlow:
    """The data flow of a forward pass in eval mode, with a marker at each site; ValueError where tracing fails."""
    return read_flow(model, *export_sites(model, sites, inputs))


def export_sites(
    model: nn.Module,
    sites: Sequence[ActivationSite],
    inputs: Inputs,
    outputs: OutputsOf = all_tensors,
    *,
    any_size: bool = False,
) -> tuple[ExportedProgram, frozenset[int]]:
    """(a forward pass as a program that can be executed, with a marker at each site; the indices of sites that ran).

    `outputs` picks the tensors of the model's output that the program gives; by default all. With `any_size`, axes of
    the inputs stay open where the model does not fix them. Raises ValueError if the model cannot be traced.
    """
    run_example(model, inputs)  # inputs that do not fit raise the model's own error
    given = placed(inputs, model)
    args = () if isinstance(given, dict) else (given,) if isinstance(given, Tensor) else given
    kwargs = given if isinstance(given, dict) else {}
    parts = {"args": args, "kwargs": kwargs}
    sizes = {name: _any_size(value) for name, value in parts.items() if value} if any_size else None
    network = _OutputTensors(model, outputs)
    reached: set[int] = set()

    def mark(x: Tensor, site: int) -> Tensor:
        reached.add(site)
        return _activation_site(x, site)

    markers = [FunctionModule(mark, (index,)) for index in range(len(sites))]
    # torch's transformers then apply a mask without asking whether its values are causal.
    unread = patch.object(
        transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True
    )
    try:
        with exchanged(sites, markers), unread, torch.no_grad(), evaluation_mode(model), same_randomness():
            reached.clear()  # an exchange may run a marker
            program = torch.export.export(network, args, kwargs, strict=False, dynamic_shapes=sizes)
    except NOT_TAKEN as error:
        raise ValueError(
            f"{type(model).__name__} runs on the example inputs, but torch.export cannot write down its operations, "
            f"from which the layers around each activation are found: {error}"
        ) from error
    return program, frozenset(reached)


def read_flow(model: nn.Module, program: ExportedProgram, reached: frozenset[int]) -> DataFlow:
    """The data flow of a program from `export_sites`, without operations whose result nothing uses."""
    graph = program.graph_module.graph
    graph.eliminate_dead_code()
    names = program.graph_signature.inputs_to_parameters
    return DataFlow(model, graph, {node: stored_name(name) for node, name in names.items()}, reached)


def stored_name(name: str) -> str:
    """The name that the model has for a parameter or buffer of a program of `export_sites`."""
    return name.removeprefix(_WRAPPED)


class _OutputTensors(nn.Module):
    def __init__(self, model: nn.Module, outputs: OutputsOf) -> None:
        super().__init__()
        self.model, self._outputs = model, outputs

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        # A language model of transformers would make a cache.
        options = {"use_cache": False} if "use_cache" in inspect.signature(self.model.forward).parameters else {}
        return self._outputs(call_with(self.model, args or kwargs, **options))


def _any_size(value: Any) -> Any:
    """The sizes of inputs for torch.export, all open: axes of tensors, and integers."""
    if isinstance(value, Tensor):
        return [torch.export.Dim.AUTO] * value.ndim
    if pytree.tree_is_leaf(value):
        return torch.export.Dim.AUTO if type(value) is int else None
    if isinstance(value, dict):
        return {name: _any_size(part) for name, part in value.items()}
    parts, _ = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    return tuple(map(_any_size, parts)) if isinstance(value, tuple) else list(map(_any_size, parts))


def operation_name(node: Any) -> str:
    """The ATen name of an operation, without overload and the underscore of in-place forms; "" for other nodes."""
    packet = getattr(getattr(node, "target", None), "overloadpacket", None)
    return "" if packet is None else packet.__name__.rstrip("_")


def is_site(node: Node) -> bool:
    """Whether a node is the call of a traced site."""
    return operation_name(node) == _MARK


def users(node: Node) -> list[Node]:
    """The operations that use the values of a node, including the graph's output."""
    return [user for user in node.users if operation_name(user) not in _BOOKKEEPING]


def uses_once(user: Node, node: Node) -> bool:
    """Whether `node` is exactly one of the arguments of `user`."""
    return sum(leaf is node for leaf in pytree.tree_leaves((user.args, user.kwargs))) == 1


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of the tensor that a node stands for, on the example inputs.

    Sizes that values decide, such as the number of graphs, are unknown and all given as one large number.
    """
    return tuple(_UNKNOWN if free_unbacked_symbols(size) else int(size) for size in node.meta["val"].shape)


def sizes_decided_by(node: Node, program: Iterable[Node]) -> list[Node]:
    """The operations of a program whose values decide sizes of a tensor, such as int(graph_of_node.max()) + 1."""
    unknown = free_unbacked_symbols(node.meta["val"])
    return [other for other in program if unknown & (other.meta.get("unbacked_bindings") or {}).keys()]


def describe(node: Node) -> str:
    """An operation and the module that it runs in, for messages."""
    if node.op == "output":
        return "the model's output"
    if node.op == "placeholder":
        return f"the input {node.name}"
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = next((path for path, *_ in reversed(stack) if path), "")
    module = module.removeprefix(_WRAPPED).removesuffix(_WRAPPED.rstrip("."))
    name = "an activation" if is_site(node) else operation_name(node) or node.name
    return f"{name} in {module}" if module else name


_TRANSPOSED = frozenset(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))


@dataclass(frozen=True)
class AffineOperation:
    """output = weight · data + bias, where the weight is a parameter, and the bias is one or absent.

    Multiplying weight and bias by λ multiplies the output; dividing the weight by λ undoes a factor of the data.

    `weight` and `bias` are names of parameters; a bias alone (`weight` None) is a sum with a parameter. `channel_axis`
    is the axis of data and output, from the right, along which the layer mixes (linear, convolution) or scales
    (normalization); None where every axis is scaled (weight aligned at the right). `output_axis` is the weight's axis
    along the output's channels, and None in the same case. `input_axis` is the weight's axis along the data's channels,
    and None for an operation that mixes nothing. `is_direct` is False where the weight is used through a view, with
    other axes.
    """

    node: Node
    data: Node
    weight: str | None
    bias: str | None = None
    channel_axis: int | None = None
    output_axis: int | None = None
    input_axis: int | None = None
    groups: int = 1
    is_direct: bool = True

    @property
    def weight_name(self) -> str:
        """`weight`. Raises ValueError for a sum with a bias alone."""
        if self.weight is None:
            raise ValueError(f"{self.node.name} is a sum with a bias, and has no weight")
        return self.weight

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the weight and the bias, if there are any."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def mixes(self) -> bool:
        """Whether the operation mixes channels by a weight of its own: a layer that can absorb 1/λ."""
        return self.input_axis is not None


def read_affine(node: Node, flow: DataFlow) -> AffineOperation | None:
    """`node` as an affine operation with parameters of its own, or None."""
    name = operation_name(node)
    if name == "linear":
        data, weight, bias = _padded(node, 3)
        return _layer(node, flow, data, weight, bias, channel_axis=-1, output_axis=0, input_axis=1)
    if name == "addmm" and not node.kwargs:
        bias, data, weight = node.args
        return _layer(node, flow, data, weight, bias, channel_axis=-1, output_axis=1, input_axis=0)
    if name in ("mm", "matmul"):
        left, right = node.args
        if flow.parameter(right) is not None and len(shape_of(right)) == 2:
            return _layer(node, flow, left, right, None, channel_axis=-1, output_axis=1, input_axis=0)
        if flow.parameter(left) is not None and len(shape_of(left)) == 2 and len(shape_of(right)) > 1:
            return _layer(node, flow, right, left, None, channel_axis=-2, output_axis=0, input_axis=1)
        return None
    if name in CONVOLUTIONS or name in _TRANSPOSED:
        data, weight, bias = _padded(node, 3)
        transposed, groups = name in _TRANSPOSED, node.args[6] if len(node.args) > 6 else 1
        axes = {"output_axis": int(transposed), "input_axis": int(not transposed), "groups": groups}
        operation = _layer(node, flow, data, weight, bias, channel_axis=1 - len(shape_of(weight)), **axes)
        # A group of a transposed convolution has no simple order of channels in the weight.
        return replace(operation, is_direct=False) if operation and transposed and groups > 1 else operation
    if name in ("mul", "add", "sub"):
        left, right = node.args[:2]
        named = [operand for operand in (left, right) if flow.parameter(operand) is not None]
        if len(named) != 1 or not (isinstance(left, Node) and isinstance(right, Node)):
            return None
        data = right if named[0] is left else left
        if shape_of(node) != shape_of(data):
            return None
        weight, bias = (flow.parameter(named[0]), None) if name == "mul" else (None, flow.parameter(named[0]))
        return AffineOperation(node, data, weight, bias, is_direct=named[0] in flow.stored)
    if name in ("batch_norm", "group_norm"):
        data, *parameters = _padded(node, 4)
        weight, bias = parameters[:2] if name == "batch_norm" else parameters[1:]
        return _layer(node, flow, data, weight, bias, channel_axis=1 - len(shape_of(data)), output_axis=0)
    if name in ("layer_norm", "rms_norm"):
        data, _, weight, bias = _padded(node, 4)
        return _layer(node, flow, data, weight, None if name == "rms_norm" else bias)  # rms_norm has an epsilon there
    return None


def _padded(node: Node, count: int) -> list[Any]:
    return [*node.args[:count], *[None] * (count - len(node.args))]


def _layer(node: Node, flow: DataFlow, data: Any, weight: Any, bias: Any, **axes: Any) -> AffineOperation | None:
    name = flow.parameter(weight)
    bias_name = flow.parameter(bias)
    if name is None or flow.parameter(data) is not None or (bias is not None and bias_name is None):
        return None
    return AffineOperation(node, data, name, bias_name, is_direct=weight in flow.stored, **axes)


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
