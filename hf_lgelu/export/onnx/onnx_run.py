"""ONNX files: run by onnxruntime, read as graphs, stripped of what tells where they were made."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hf_lgelu.extras import require

ACTIVATION_OPERATIONS = frozenset(
    {
        *("Relu", "LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "HardSwish", "HardSigmoid", "Mish"),
        *("Gelu", "FastGelu", "BiasGelu", "QuickGelu", "Erf", "Tanh", "Sigmoid", "Softplus", "Swish"),
    }
)
"""One node of these in an activation's place: Erf stands for a λ-GELU, Tanh for GELU's tanh form."""

INTEGER_LAYERS = frozenset(
    {
        *("QGemm", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat"),
        *("DynamicQuantizeMatMul", "QAttention"),
    }
)
"""Operations that multiply integer weights with integer activations."""


class OnnxModel:
    """One ONNX file in onnxruntime on the CPU: a mapping of named arrays in, arrays out.

    Args:
        path: of the file.
        threads: of the computation; 1 starts none.
        optimized_path: where to keep the graph that onnxruntime makes of the file and really runs.

    Raises ImportError that names the extra [onnx], FileNotFoundError for a path that is no file.
    """

    def __init__(
        self, path: str | os.PathLike, *, threads: int = 1, optimized_path: str | os.PathLike | None = None
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        runtime = require("onnxruntime", "onnx")
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is no file")
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3  # it warns that a saved optimized graph is for this kind of CPU
        if optimized_path is not None:
            options.optimized_model_filepath = os.fspath(optimized_path)
        self._session = runtime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        self.input_names: tuple[str, ...] = tuple(value.name for value in self._session.get_inputs())
        self.output_names: tuple[str, ...] = tuple(value.name for value in self._session.get_outputs())

    def __call__(self, inputs: Mapping[str, np.ndarray | Tensor]) -> list[np.ndarray]:
        """The outputs in the order of `output_names`; an input that the graph does not have is a ValueError."""
        if set(inputs) != set(self.input_names):
            raise ValueError(f"the graph takes {', '.join(self.input_names)}; got {', '.join(inputs)}")
        return self._session.run(None, as_arrays(inputs))


def as_arrays(inputs: Mapping[str, np.ndarray | Tensor]) -> dict[str, np.ndarray]:
    """The same values as contiguous numpy arrays."""
    arrays = {n: v.detach().cpu().numpy() if isinstance(v, Tensor) else np.asarray(v) for n, v in inputs.items()}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def count_operations(path: str | os.PathLike) -> Counter[str]:
    """{operation: nodes} of the graph of an ONNX file, its inner graphs included."""
    return Counter(node.op_type for node in _nodes(_read(path).graph))


def count_activations(path: str | os.PathLike) -> int:
    """Activations that the graph of an ONNX file computes in float, fused into another node or not.

    Of λ-GELU, which has no operation of its own, the Erf is counted.
    """
    nodes = _nodes(_read(path).graph)
    return sum(
        node.op_type in ACTIVATION_OPERATIONS
        or any(attribute.name == "activation" and attribute.s for attribute in node.attribute)
        for node in nodes
    )


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


def _read(path: str | os.PathLike) -> Any:
    return require("onnx", "onnx").load(os.fspath(path))


def _nodes(graph: Any) -> list[Any]:
    nodes = list(graph.node)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                nodes += _nodes(inner)
    return nodes
