"""The operations of an ONNX graph that large numbers flow through, and that int8 would make useless.

A range holds 256 values. An attention mask adds numbers of the size of −3.4e38 to scores of the size of 10: in one
range with it all scores are the same. So are ages in one range with incomes, where a network takes raw features and
scales them itself. What such numbers flow through, up to and with the softmax behind them, stays in float.
"""

import os
from pathlib import Path

import numpy as np

from hf_lgelu.export.onnx.onnx_run import read_onnx
from hf_lgelu.extras import require

LARGE = 1e4
"""No trained scale is as large; masks are −1e4 (for float16), −1e9 or the lowest float32."""

_ENDS = frozenset({"Softmax", "LogSoftmax"})
# Sums of products have a range of their own; and what is compared is no number any more.
_NOT_LARGE_BEHIND = frozenset(
    {
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "LayerNormalization", "BatchNormalization", "Shape"),
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And", "Or", "IsNaN", "IsInf"),
        *("Sin", "Cos", "Tanh", "Sigmoid", "Erf", "ArgMax", "Pow", "Reciprocal"),
    }
)


def large_number_operations(path: Path, batches: list[dict[str, np.ndarray]]) -> list[str]:
    """Names of the nodes that large numbers flow through, up to and with a softmax; nodes without one are named.

    Large is a constant of the graph, or an input's value, of at least `LARGE`.
    """
    onnx = require("onnx", "onnx")
    model = read_onnx(path)
    graph, large = model.graph, {name for batch in batches for name, rows in batch.items() if _is_large(rows)}
    large |= {tensor.name for tensor in graph.initializer if _is_large(onnx.numpy_helper.to_array(tensor))}
    found = []
    for number, node in enumerate(graph.node):  # a graph lists its nodes in an order in which they can run
        node.name = node.name or f"{node.op_type}_{number}_unnamed"
        constants = [onnx.numpy_helper.to_array(a.t) for a in node.attribute if a.name == "value" and a.HasField("t")]
        if any(_is_large(constant) for constant in constants):
            large |= set(node.output)
        numbers = node.input[1:] if node.op_type == "Where" else node.input  # not the condition
        if large.isdisjoint(numbers) or node.op_type in _NOT_LARGE_BEHIND:
            continue
        found.append(node.name)
        if node.op_type not in _ENDS:
            large |= set(node.output)
    onnx.save(model, os.fspath(path))
    return found


def _is_large(values: np.ndarray) -> bool:
    return values.dtype.kind == "f" and bool((np.abs(values) >= LARGE).any())
