"""ONNX files: run by onnxruntime, compared with torch, stripped of what tells where they were made."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_lgelu.comparing.output_comparison import OutputChange, OutputComparison
from hf_lgelu.environment import require
from hf_lgelu.networks.masks import counted_rows
from hf_lgelu.networks.outputs import classes_last


class OnnxModel:
    """One ONNX file in onnxruntime on one thread of the CPU: a mapping of named arrays in, arrays out.

    Raises ImportError that names the extra [onnx], ValueError for a file that onnxruntime cannot read or run.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        runtime = require("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # starts none
        try:
            self._session = runtime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        except runtime_errors() as error:
            raise ValueError(f"onnxruntime cannot run {path}; is it a whole ONNX file? {error}") from error
        self.input_names: tuple[str, ...] = tuple(value.name for value in self._session.get_inputs())
        self.output_names: tuple[str, ...] = tuple(value.name for value in self._session.get_outputs())

    def __call__(self, inputs: Mapping[str, np.ndarray | Tensor]) -> list[np.ndarray]:
        """The outputs in the order of `output_names`; ValueError for other inputs than the graph's."""
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


def require_parity(
    onnx_model: OnnxModel, inputs: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, where: str
) -> OutputChange:
    """The change from `expected`, torch's outputs by name, to what onnxruntime gives for `inputs`: of all outputs.

    Padding is left out, and so are inputs that the graph does not have. `tolerance` is relative to an output's largest
    value, or to 1 if that is larger; `where` says what the inputs are. RuntimeError for more.
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
