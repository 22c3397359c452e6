"""The operations of an ONNX graph that an attention mask flows through, and that int8 would make useless.

A range holds 256 values. An attention mask adds numbers of the size of −3.4e38 to scores of the size of 10: in one
range with it all scores are the same. What a mask flows through, up to and with the softmax behind it, stays in float.
"""

import os
from pathlib import Path

import numpy as np

from hf_lgelu.export.onnx.onnx_run import read_onnx
from hf_lgelu.extras import require

_MASK = 1e4  # No trained scale is as large; masks are -1e4 (for float16), -1e9 or the lowest float32.
_MASKS_END = frozenset({"Softmax", "LogSoftmax"})
# A mask is added or chosen, never multiplied into a sum of products; and what is compared is no number any more.
_NO_MASK_BEHIND = frozenset(
    {
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "LayerNormalization", "BatchNormalization", "Shape"),
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And", "Or", "IsNaN", "IsInf"),
        *("Sin", "Cos", "Tanh", "Sigmoid", "Erf", "ArgMax", "Pow", "Reciprocal"),
    }
)


def mask_operations(path: Path, batches: list[dict[str, np.ndarray]]) -> list[str]:
    """Names of the nodes that an additive mask flows through, up to and with a softmax; nodes without one are named.

    A mask is recognized by its size: a constant of the graph, or an input's value, of at least 1e4.
    """
    onnx = require("onnx", "onnx")
    model = read_onnx(path)
    graph, masks = model.graph, {name for batch in batches for name, rows in batch.items() if _is_mask(rows)}
    masks |= {tensor.name for tensor in graph.initializer if _is_mask(onnx.numpy_helper.to_array(tensor))}
    found = []
    for number, node in enumerate(graph.node):  # a graph lists its nodes in an order in which they can run
        node.name = node.name or f"{node.op_type}_{number}_unnamed"
        constants = [onnx.numpy_helper.to_array(a.t) for a in node.attribute if a.name == "value" and a.HasField("t")]
        if any(_is_mask(constant) for constant in constants):
            masks |= set(node.output)
        numbers = node.input[1:] if node.op_type == "Where" else node.input  # not the condition
        if masks.isdisjoint(numbers) or node.op_type in _NO_MASK_BEHIND:
            continue
        found.append(node.name)
        if node.op_type not in _MASKS_END:
            masks |= set(node.output)
    onnx.save(model, os.fspath(path))
    return found


def _is_mask(values: np.ndarray) -> bool:
    return values.dtype.kind == "f" and bool((np.abs(values) >= _MASK).any())
