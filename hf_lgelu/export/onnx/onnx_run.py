"""ONNX files: run by onnxruntime, compared with torch, read as graphs, stripped of what tells where they were made."""

import contextlib
import io
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_lgelu.environment import require
from hf_lgelu.models.batches import counted_rows
from hf_lgelu.models.outputs import OutputChange, OutputComparison, classes_last

CLIPS = frozenset({"Relu", "Clip"})
"""Activations that a quantizer to unsigned integers does by clipping: nothing is left of them."""

ACTIVATION_OPERATIONS = CLIPS | {
    *("LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "HardSwish", "HardSigmoid", "Mish"),
    *("Gelu", "FastGelu", "BiasGelu", "QuickGelu", "Erf", "Tanh", "Sigmoid", "Softplus", "Swish"),
}
"""One node of these in an activation's place: Erf stands for a λ-GELU, Tanh for GELU's tanh form."""

INTEGER_ACTIVATIONS = frozenset({"QLinearLeakyRelu", "QLinearSigmoid"})
"""Activations for which onnxruntime has an operation on integers."""

INTEGER_LAYERS = frozenset(
    {
        *("QGemm", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat"),
        *("DynamicQuantizeMatMul", "QAttention"),
    }
)
"""Operations that multiply integer weights with integer activations."""

_CONSTANT = ("Constant", "value")


class OnnxModel:
    """One ONNX file in onnxruntime on one thread of the CPU: a mapping of named arrays in, arrays out.

    Args:
        path: of the file.
        optimized_path: where to keep the graph that onnxruntime makes of the file and really runs.

    Raises ImportError that names the extra [onnx], FileNotFoundError for a path that is no file, ValueError for a file
    that onnxruntime cannot read or run.
    """

    def __init__(self, path: str | os.PathLike, *, optimized_path: str | os.PathLike | None = None) -> None:
        runtime = require("onnxruntime", "onnx")
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is no file")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # starts none
        options.log_severity_level = 3  # it warns that a saved optimized graph is for this kind of CPU
        if optimized_path is not None:
            options.optimized_model_filepath = os.fspath(optimized_path)
        try:
            self._session = runtime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        except runtime_errors() as error:
            raise ValueError(f"onnxruntime cannot run {path}; is it a whole ONNX file? {error}") from error
        self.input_names: tuple[str, ...] = tuple(value.name for value in self._session.get_inputs())
        self.output_names: tuple[str, ...] = tuple(value.name for value in self._session.get_outputs())

    def __call__(self, inputs: Mapping[str, np.ndarray | Tensor]) -> list[np.ndarray]:
        """The outputs in the order of `output_names`; an input that the graph does not have is a ValueError."""
        if set(inputs) != set(self.input_names):
            raise ValueError(f"the graph takes {', '.join(self.input_names)}; got {', '.join(inputs)}")
        arrays = as_arrays(inputs)
        try:
            return self._session.run(None, arrays)
        except runtime_errors() as error:
            shapes = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
            raise ValueError(f"onnxruntime refuses the inputs ({shapes}): {error}") from error


def runtime_errors() -> tuple[type[Exception], ...]:
    """The classes of onnxruntime's own errors, which have no common parent but Exception."""
    native = require("onnxruntime.capi.onnxruntime_pybind11_state", "onnx")
    return tuple(kind for kind in vars(native).values() if isinstance(kind, type) and issubclass(kind, Exception))


def as_arrays(inputs: Mapping[str, np.ndarray | Tensor]) -> dict[str, np.ndarray]:
    """The same values as contiguous numpy arrays."""
    arrays = {n: v.detach().cpu().numpy() if isinstance(v, Tensor) else np.asarray(v) for n, v in inputs.items()}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def count_operations(model: Any) -> Counter[str]:
    """{operation: nodes} of an ONNX model's graph, its inner graphs included."""
    return Counter(node.op_type for node in all_nodes(model.graph))


def find_activations(model: Any) -> list[Any]:
    """The nodes of an ONNX model that stand for an activation, one each, fused into another node or not.

    Of λ-GELU, which has no operation of its own, that is the Erf; of a squared ReLU the square. A Clip is one where it
    begins at 0. What is computed of constants (λ of its parameter) is none.
    """
    nodes = all_nodes(model.graph)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    constants |= {node.output[0]: a.t for node in nodes for a in node.attribute if (node.op_type, a.name) == _CONSTANT}
    relus = {node.output[0] for node in nodes if node.op_type == "Relu"}
    squares = [node for node in nodes if node.op_type == "Pow" and node.input[0] in relus]
    squared = {node.input[0] for node in squares}
    found = [
        node
        for node in nodes
        if (
            node.op_type in ACTIVATION_OPERATIONS
            and not constants.keys() >= set(node.input)
            and (node.op_type != "Clip" or _begins_at_zero(node, constants))
        )
        or any(attribute.name == "activation" and attribute.s for attribute in node.attribute)
    ]
    return [node for node in found if not squared.intersection(node.output)] + squares


def _begins_at_zero(clip: Any, constants: Mapping[str, Any]) -> bool:
    low = constants.get(clip.input[1]) if len(clip.input) > 1 else None
    return low is not None and not require("onnx", "onnx").numpy_helper.to_array(low).any()


def strip_metadata(message: Any) -> None:
    """Remove documentation and metadata from an ONNX model in place, wherever it holds some.

    The exporter of torch writes stack traces with file names into every node.
    """
    for field, value in list(message.ListFields()):
        if field.name in ("metadata_props", "doc_string"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                strip_metadata(inner)


def read_onnx(path: str | os.PathLike) -> Any:
    """The ONNX model of a file. Raises ValueError for a file that holds none, FileNotFoundError for no file."""
    onnx, message = require("onnx", "onnx"), require("google.protobuf.message", "onnx")
    try:
        return onnx.load(os.fspath(path))
    except message.DecodeError as error:
        raise ValueError(f"{path} holds no ONNX graph, or not all of one: {error}") from error


def all_nodes(graph: Any) -> list[Any]:
    """The nodes of an ONNX graph, those of its inner graphs behind."""
    nodes = list(graph.node)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                nodes += all_nodes(inner)
    return nodes


def require_parity(
    onnx_model: OnnxModel, inputs: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, where: str
) -> OutputChange:
    """The change from `expected`, torch's outputs by name, to what onnxruntime gives for `inputs`: of all outputs.

    Outputs at positions that an attention_mask of zeros marks as padding are left out.

    Args:
        onnx_model: the file.
        inputs: by name; those that the graph does not have, as their values change nothing, are left out.
        expected: in the order of the graph's outputs.
        tolerance: relative to an output's largest value, or to 1 if that is larger.
        where: what the inputs are, for the error.

    Raises:
        RuntimeError: an output has another shape, or differs by more than the tolerance.
    """
    found = onnx_model({name: value for name, value in inputs.items() if name in onnx_model.input_names})
    total = OutputComparison()
    for (name, wanted), array in zip(expected.items(), found, strict=True):
        if array.shape != wanted.shape:
            raise RuntimeError(f"onnxruntime gives {name} of shape {array.shape} {where}, torch {tuple(wanted.shape)}")
        pair = (without_padding(values.detach().cpu(), inputs, name) for values in (wanted, torch.from_numpy(array)))
        output = OutputComparison().add(*map(classes_last, pair))
        here, size = output.largest_change, output.largest_output
        if not here <= tolerance * max(1.0, size):  # also where it is NaN
            raise RuntimeError(
                f"onnxruntime differs from torch by {here:.3g} in {name} {where}, where the largest is {size:.3g}; "
                f"allowed is {tolerance:g} of it, or of 1 if that is larger. The file is not kept"
            )
        total.merge(output)
    return total.change


def without_padding(values: Tensor, inputs: Mapping[str, Tensor], name: str) -> Tensor:
    """The positions of an output that are no padding (`counted_rows`), where each runtime has its own arbitrary values.

    An output without an axis of positions lacks the samples that are nothing but padding: a batch that is padded in
    front, cut short behind, has some. Of two axes the second may be as long as the mask by chance, or hold a number a
    token (start_logits), of which a row is one prediction.
    """
    counted = counted_rows(inputs, values, name) if values.ndim > 2 else None
    mask = inputs.get("attention_mask")
    if counted is None and mask is not None and mask.ndim == 2 and values.ndim and len(values) == len(mask):
        counted = mask.bool() if values.ndim > 3 and values.shape[:2] == mask.shape else mask.bool().any(1)
    return values if counted is None else values[counted.to(values.device)]


@contextmanager
def silence_python(logger: str | None = None) -> Iterator[None]:
    """Without warnings, Python's stdout and what one logger says below ERROR; None is the root logger."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
