"""An ONNX file as a network of torch, which can be converted and written back into the file's own graph."""

import copy
import operator
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from hf_lgelu.environment import require
from hf_lgelu.export.onnx_operators import OPERATORS, run_operator
from hf_lgelu.export.onnx_run import OnnxModel, read_onnx, require_parity
from hf_lgelu.files import whole_file
from hf_lgelu.models.graph_gates import with_gate_modules
from hf_lgelu.networks.run import NOT_TAKEN, in_words, run_example
from hf_lgelu.networks.sites import computes_same

# Operators that are gates by themselves. Sigmoid, HardSigmoid, Tanh and Softplus are parts of gates.
_GATES: dict[str, Any] = {
    "Celu": nn.CELU, "Elu": nn.ELU, "Gelu": lambda approximate="none": nn.GELU(approximate), "HardSwish": nn.Hardswish,
    "LeakyRelu": lambda alpha=0.01: nn.LeakyReLU(alpha), "Mish": nn.Mish, "Relu": nn.ReLU, "Selu": nn.SELU,
    "Swish": nn.SiLU,
}  # fmt: skip
_MAPS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization", "LayerNormalization")
"""Operators whose second input is a weight, and whose third one is a bias."""

_COMPARED_ROWS = 8
_TOLERANCE = 1e-3  # of the largest output: two runtimes add in another order


class OnnxNetwork(nn.Module):
    """The network of an ONNX file, in eval mode, for `convert_to_relu`.

    It takes tensors in the order of the file's inputs, or by their names. It gives the outputs by name, or a single
    output with an entry or a row for each sample as a bare tensor, which is compared as class scores.
    Where the file fixes a batch size, larger batches run at once; a graph that gives something else then is refused.

    >>> import tempfile, torch
    >>> from hf_lgelu import OnnxNetwork, convert_to_relu, export_onnx
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.SiLU(), torch.nn.Linear(16, 3))
    >>> rows = torch.randn(200, 4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = export_onnx(net, f"{folder}/model.onnx", rows)
    ...     converted, report = convert_to_relu(OnnxNetwork(f"{folder}/model.onnx", rows), rows)
    ...     converted.save(f"{folder}/relu.onnx").name
    'relu.onnx'
    """

    def __init__(self, path: str | os.PathLike, rows: Tensor | Mapping[str, Tensor]) -> None:
        """Read a file. `rows` are inputs, by name if there are several: on the first eight of them, here and in `save`,
        onnxruntime must give what torch gives.

        Raises ValueError for an operator that is not read, and for inputs that the file does not take. Raises
        RuntimeError where torch gives other outputs than onnxruntime. Raises ImportError without the extra [onnx].
        """
        super().__init__()
        model = read_onnx(path)
        self._file = model.SerializeToString()
        reader = _Reader(model)
        self.input_names, self.output_names = reader.inputs, [output.name for output in model.graph.output]
        named = rows if isinstance(rows, Mapping) else {reader.inputs[0]: rows}
        least, self.batch_size = reader.batch or 1, reader.batch
        if {*named} != {*reader.inputs} or any(len(value) < least for value in named.values()):
            wanted = f"{path} takes the inputs {', '.join(reader.inputs)}, in batches of {least} or more rows"
            raise ValueError(f"{wanted}; got {in_words(named)}")
        most = max(_COMPARED_ROWS // least, 1) * least
        self._rows = {name: torch.as_tensor(named[name])[:most] for name in reader.inputs}
        self.graph = with_gate_modules(GraphModule(reader.root, reader.graph))
        self._tensors = reader.tensors
        self._gates = {
            node.target: (node.args[0].meta["tensor"], node.meta["tensor"], self.graph.get_submodule(node.target))
            for node in self.graph.graph.find_nodes(op="call_module")
        }
        self.eval()
        self._require_same(path)

    def forward(self, *args: Tensor, **inputs: Tensor) -> Any:
        inputs |= dict(zip(self.input_names, args, strict=False))
        outputs = self.graph(*(inputs[name] for name in self.input_names))
        is_scores = len(outputs) == 1 and outputs[0].ndim < 3  # a bare tensor is read as class scores
        return outputs[0] if is_scores else dict(zip(self.output_names, outputs, strict=True))

    def save(self, path: str | os.PathLike, *, overwrite: bool = False) -> Path:
        """Write the file's own graph with the present gates and weights. All else in it stays as it was.

        Raises ValueError for another gate than ReLU, FileExistsError without `overwrite`, and RuntimeError
        where onnxruntime gives other outputs than torch; then nothing is written.
        """
        onnx = require("onnx", "onnx")
        model = onnx.load_from_string(self._file)
        graph = model.graph
        for name, (x, y, original) in self._gates.items():
            gate = self.graph.get_submodule(name)
            if not computes_same(gate, original):
                if not computes_same(gate, nn.ReLU()):
                    raise ValueError(f"{name} is {gate}: an ONNX file is given ReLU in the gates' places")
                place = _rename(graph, y)
                graph.node.insert(place + 1, onnx.helper.make_node("Relu", [x], [y], name=f"{y}_gate"))
        held = {initializer.name: initializer for initializer in graph.initializer}
        before = _Reader(onnx.load_from_string(self._file)).root.state_dict()
        for name, value in self.graph.state_dict().items():
            if name in self._tensors and not torch.equal(value.cpu(), before[name]):
                tensor = onnx.numpy_helper.from_array(value.cpu().numpy(), self._tensors[name])
                if tensor.name in held:
                    held[tensor.name].CopyFrom(tensor)
                else:  # a constant that nodes of the file give
                    _rename(graph, tensor.name)
                    graph.initializer.append(tensor)
        _without_unused(graph)
        with whole_file(path, overwrite=overwrite) as new:
            onnx.save(model, os.fspath(new))
            self._require_same(new)
        return Path(path)

    @torch.no_grad()
    def _require_same(self, path: str | os.PathLike) -> None:
        """Raise RuntimeError unless onnxruntime gives for the first rows what torch gives."""
        device = next(self.buffers(), next(self.parameters(), torch.zeros(1))).device
        rows = {name: value.to(device) for name, value in self._rows.items()}
        try:
            found = run_example(self, rows)
        except NOT_TAKEN as error:
            raise ValueError(
                f"{path} does not run in torch on {in_words(self._rows)}: {error}. If the file fixes a batch size, "
                "give one with a free batch axis"
            ) from error
        found = dict(zip(self.output_names, [found], strict=True)) if isinstance(found, Tensor) else found
        runtime, count = OnnxModel(path), len(next(iter(rows.values())))
        parts = count // (self.batch_size or count)  # a fixed batch size at a time
        for number in range(parts):

            def part(value: Tensor, number: int = number) -> Tensor:
                return value.tensor_split(parts)[number] if parts > 1 and value.ndim else value

            given, expected = ({name: part(value) for name, value in each.items()} for each in (self._rows, found))
            require_parity(runtime, given, expected, _TOLERANCE, f"of {path}")


class _Reader:
    """The graph of an ONNX model as one of torch.fx: `graph`, `root` with its weights, `inputs` by name.

    `tensors` is {name of a weight or constant in `root`: name of its tensor in the file}. `batch` is the batch size
    that the file fixes, or None.
    """

    def __init__(self, model: Any) -> None:
        """Raises ValueError for operators that are not read."""
        self._onnx = require("onnx", "onnx")
        self.graph, self.root, self.tensors = Graph(), nn.Module(), dict[str, str]()
        self._version = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
        self._constants = {each.name: self._tensor(each) for each in model.graph.initializer}
        self._nodes: dict[str, Node] = {}
        self._uses = Counter(name for node in model.graph.node for name in node.input)
        unknown = {node.op_type for node in model.graph.node} - {*OPERATORS, *_GATES, "Constant"}
        if unknown:
            raise ValueError(
                f"the file has operators that are not read: {', '.join(sorted(unknown))}. Give the file as it was "
                "before they were added (before quantization, without the choice of boxes), or convert the network in "
                "the framework that it comes from"
            )
        given = [each for each in model.graph.input if each.name not in self._constants]
        self.inputs = [each.name for each in given]
        sizes = {each.type.tensor_type.shape.dim[0].dim_value for each in given if each.type.tensor_type.shape.dim}
        self.batch = sizes.pop() or None if len(sizes) == 1 else None
        for name in self.inputs:
            self._nodes[name] = self.graph.placeholder(self._free(name))
            self._nodes[name].meta["tensor"] = name
        for node in model.graph.node:
            self._read(node)
        self.graph.output([self._node(each.name) for each in model.graph.output])

    def _free(self, name: str) -> str:
        """A name for Python that nothing in `root` has."""
        name = re.sub(r"\W+", "_", name).strip("_")
        name = name if name.isidentifier() else f"n{name}"
        while hasattr(self.root, name):
            name += "_"
        return name

    def _tensor(self, value: Any) -> Tensor:
        return torch.from_numpy(np.array(self._onnx.numpy_helper.to_array(value)))

    def _option(self, attribute: Any) -> Any:
        value = self._onnx.helper.get_attribute_value(attribute)
        value = self._tensor(value) if isinstance(value, self._onnx.TensorProto) else value
        return value.decode() if isinstance(value, bytes) else value

    def _read(self, node: Any) -> None:
        """Add a node of the file."""
        options = {each.name: self._option(each) for each in node.attribute}
        kind, name = node.op_type, node.output[0]
        if kind == "Constant":
            (value,) = options.values()
            self._constants[name] = value if isinstance(value, Tensor) else torch.tensor(value)
            return
        # Code of torch.fx holds numbers, and no tensors.
        options = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in options.items()}
        if kind in ("Softmax", "LogSoftmax") and self._version < 13:
            options = {"axis": 1, "is_flat": True} | options
        if kind == "Split":
            options["outputs"] = len(node.output)
        if all(each in self._constants for each in node.input if each) and kind not in _GATES:
            values = [self._constants.get(each) for each in node.input]
            found = run_operator(kind, *values, **options)
            self._constants |= dict(zip(node.output, [found] if isinstance(found, Tensor) else found, strict=False))
            return
        if kind == "Reshape":
            options["batch"] = self.batch
        if kind == "Add" and self._added(node, name):
            return
        own, roles = self._free(node.name or name), {1: "weight", 2: "bias"} if kind in _MAPS else {}
        if kind in _GATES:
            self.root.add_module(own, _GATES[kind](**options))
            made = self.graph.call_module(own, (self._node(node.input[0]),))
        else:
            inputs = [self._node(each, own, roles.get(place)) for place, each in enumerate(node.input)]
            made = self.graph.create_node("call_function", run_operator, (kind, *inputs), options, name=own)
            made.meta["is_wrapped"] = True  # for torch.fx: another trace goes around it, not through it
        made.meta["tensor"] = name
        self._nodes[name] = made
        for place, each in enumerate(node.output if kind in ("Split", "TopK") else ()):
            self._nodes[each] = self.graph.call_function(operator.getitem, (made, place))
            self._nodes[each].meta["tensor"] = each

    def _added(self, node: Any, name: str) -> bool:
        """Whether an Add of one number a channel became the bias of the map before it."""
        for x, bias in (node.input, reversed(node.input)):
            made, value = self._nodes.get(x), self._constants.get(bias)
            if made is None or value is None or bias in self._nodes or self._uses[x] > 1 or value.numel() == 1:
                continue
            kind, _, weight, *more = (*made.args, None, None)[:4] if made.target is run_operator else (None,) * 4
            sizes = weight.meta.get("shape", ()) if isinstance(weight, Node) else ()
            axis = {"Conv": 0, "ConvTranspose": 1, "MatMul": 1}.get(str(kind))
            if axis is None or more != [None] or (len(sizes) != 2 if kind == "MatMul" else len(sizes) < 3):
                continue
            outputs = sizes[axis] * (made.kwargs.get("group", 1) if axis == 1 else 1)
            channels = -1 if kind == "MatMul" else 1 - len(sizes)
            if value.numel() != outputs or [*[1] * len(sizes), *value.shape][channels] != outputs:
                continue
            with self.graph.inserting_before(made):
                made.args = (*made.args[:3], self._node(bias, str(weight.target).rpartition(".")[0], "bias"))
            made.meta["tensor"], self._nodes[name] = name, made
            return True
        return False

    def _node(self, name: str, owner: str = "", role: str | None = None) -> Node | None:
        """The node of a tensor. A constant gets a place in `root`: with a role as the parameter `owner`.role."""
        if name in self._nodes or not name:
            return self._nodes.get(name)
        if name not in self._constants:
            raise ValueError(f"{name} is a further output of an operator, which is not read")
        value, place = self._constants[name], self._free(name)
        if role is not None and value.is_floating_point() and value.numel() > 1:
            if not hasattr(self.root, owner):
                self.root.add_module(owner, nn.Module())
            place = f"{owner}.{role}"
            self.root.get_submodule(owner).register_parameter(role, nn.Parameter(value))
        else:
            self.root.register_buffer(place, value)
        self.tensors[place] = name
        self._nodes[name] = self.graph.get_attr(place)
        self._nodes[name].meta |= {"tensor": name, "shape": tuple(value.shape)}
        return self._nodes[name]


def _rename(graph: Any, tensor: str) -> int:
    """Free the name of a tensor that a node makes; the node's place among the nodes."""
    place = next(place for place, node in enumerate(graph.node) if tensor in node.output)
    outputs = graph.node[place].output
    outputs[:] = [f"{each}_before" if each == tensor else each for each in outputs]
    return place


def _without_unused(graph: Any) -> None:
    """Remove the nodes and weights of a graph that nothing reads any more."""
    read = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if read & {*node.output}:
            read |= {*node.input}
            kept.append(node)
    for field, entries in (
        (graph.node, kept[::-1]),
        (graph.initializer, [each for each in graph.initializer if each.name in read]),
    ):
        entries = [copy.deepcopy(each) for each in entries]
        del field[:]
        field.extend(entries)
