"""Running an ONNX file on the CPU with onnxruntime. Needs the extra "onnx"."""

import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hf_lgelu.deploy.extras import require


class OnnxSession:
    """A file ready to run: call it with {input name: tensor}, get the outputs as float32 tensors.

    Args:
        path: the .onnx file.
        threads: that one operation may use; operations run one after the other.

    Raises ImportError if the extra "onnx" is not installed.
    """

    def __init__(self, path: str | os.PathLike, *, threads: int = 1) -> None:
        onnxruntime = require("onnxruntime", "onnx")
        self._session = onnxruntime.InferenceSession(
            str(path), _options(onnxruntime, threads), providers=["CPUExecutionProvider"]
        )
        self.input_names = tuple(entry.name for entry in self._session.get_inputs())

    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        feeds = {name: inputs[name].detach().cpu().numpy() for name in self.input_names}
        return [torch.from_numpy(output) for output in self._session.run(None, feeds)]


def executed_operations(path: str | os.PathLike) -> dict[str, int]:
    """{operation: count} of the graph that onnxruntime really runs on this CPU, after its own fusions."""
    onnx, onnxruntime = require("onnx", "onnx"), require("onnxruntime", "onnx")
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        options = _options(onnxruntime, 1)
        options.optimized_model_filepath = str(optimized)
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        graph = onnx.load(str(optimized)).graph
    return dict(sorted(Counter(node.op_type for node in graph.node).items()))


def _options(onnxruntime: object, threads: int) -> object:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors alone
    return options
