"""ONNX files: run by onnxruntime, compared with torch, stripped of paths and stack traces."""

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

from hf_lgelu.comparing.comparison import OutputComparison
from hf_lgelu.comparing.distance import Distance
from hf_lgelu.environment import require
from hf_lgelu.networks.masks import counted_rows
from hf_lgelu.networks.outputs import classes_last


class OnnxModel:
    """An ONNX file in onnxruntime, on one thread of the CPU. It takes a mapping of named arrays, and gives arrays.

    Raises ImportError if the extra [onnx] is missing, and ValueError for a file that onnxruntime cannot read or run.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        runtime = require("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1  # no other thread is started
        try:
            self._session = runtime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors share no other class
            raise ValueError(f"onnxruntime cannot run {path}; is it a whole ONNX file? {error}") from error
        self.input_shapes: dict[str, list[Any]] = {each.name: each.shape for each in self._session.get_inputs()}
        self.input_names: tuple[str, ...] = tuple(self.input_shapes)
        self.output_names: tuple[str, ...] = tuple(value.name for value in self._session.get_outputs())

    def __call__(self, inputs: Mapping[str, np.ndarray | Tensor]) -> list[np.ndarray]:
        """The outputs in the order of `output_names`. Raises ValueError for inputs that the graph does not take."""
        arrays = as_arrays(inputs)
        try:
            return self._session.run(None, arrays)
        except Exception as error:
            shapes = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
            raise ValueError(f"onnxruntime refuses the inputs ({shapes}): {error}") from error


def as_arrays(inputs: Mapping[str, np.ndarray | Tensor]) -> dict[str, np.ndarray]:
    """The same values as contiguous numpy arrays."""
    arrays = {n: v.detach().cpu().numpy() if isinstance(v, Tensor) else np.asarray(v) for n, v in inputs.items()}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def strip_metadata(message: Any) -> None:
    """Remove documentation and metadata from an ONNX model in place.

    torch's exporter writes stack traces with file names into every node.
    """
    for field, value in list(message.ListFields()):
        if field.name in ("metadata_props", "doc_string"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                strip_metadata(inner)


def read_onnx(path: str | os.PathLike) -> Any:
    """The ONNX model of a file. Raises ValueError for a file without one, FileNotFoundError if there is no file."""
    onnx, message = require("onnx", "onnx"), require("google.protobuf.message", "onnx")
    try:
        return onnx.load(os.fspath(path))
    except message.DecodeError as error:
        raise ValueError(f"{path} holds no ONNX graph, or a part of one: {error}") from error


def require_parity(
    onnx_model: OnnxModel, inputs: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, where: str
) -> Distance:
    """The distance of onnxruntime's outputs for `inputs` from `expected`, torch's by name, where it changes most.

    Padding is left out, and so are inputs that the graph does not have. `tolerance` is relative to an output's largest
    value, or to 1 if that is larger. Raises RuntimeError for a larger change; `where` names the inputs in the message.
    """
    found = onnx_model({name: value for name, value in inputs.items() if name in onnx_model.input_names})
    distances = []
    for (name, wanted), array in zip(expected.items(), found, strict=True):
        if array.shape != wanted.shape:
            raise RuntimeError(f"onnxruntime gives {name} of shape {array.shape} {where}, torch {tuple(wanted.shape)}")
        first, second = (classes_last(values.detach().cpu()) for values in (wanted, torch.from_numpy(array)))
        distance = OutputComparison().add(first, second, counted_rows(inputs, first, name)).record(name)
        here, size = distance.largest_change, distance.largest_output
        if not here <= tolerance * max(1.0, size):  # also where it is NaN
            raise RuntimeError(
                f"onnxruntime differs from torch by {here:.3g} in {name} {where}; the largest value is {size:.3g}, and "
                f"{tolerance:g} of it, or of 1 if that is larger, is allowed. Nothing is written"
            )
        distances.append(distance)
    return max(distances, key=lambda distance: distance.largest_change)


@contextmanager
def silence_python(logger: str | None = None) -> Iterator[None]:
    """A block without warnings, Python's stdout, and messages of a logger below ERROR; None is the root logger."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
