"""A model as one ONNX file that computes the same in onnxruntime, for any batch size and sequence length."""

import contextlib
import copy
import inspect
import io
import itertools
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hf_lgelu.deploy.extras import require
from hf_lgelu.deploy.onnx_run import OnnxModel, as_arrays, count_activations, strip_metadata
from hf_lgelu.deploy.whole_file import whole_file
from hf_lgelu.models.example_run import ExampleInputs, evaluation_mode

OPSET = 20
"""The first with Gelu."""

MAX_BYTES = 2**31 - 2**20
"""What one ONNX file can hold: protobuf ends at 2 GiB, and the graph needs some room."""

DynamicAxes = Mapping[str, Mapping[int, str]]
"""{input: {axis: name}}; axes of one name have one size."""


@dataclass(frozen=True)
class OnnxReport:
    """What `export_onnx` wrote and how well it agrees.

    `inputs` are {name: shape}, an axis that may vary by its name. `max_abs_difference` is the largest difference
    between torch's and onnxruntime's outputs on the example inputs; `other_shapes_max_abs_difference` is that on the
    batches of other sizes, `other_shapes`, each {axis: size}. `largest_output` is the largest |output| of torch.
    `activations` counts the nodes that stand for an activation, one each (Relu, Gelu, or Erf for λ-GELU).
    """

    path: Path
    file_bytes: int
    opset: int
    inputs: dict[str, tuple[int | str, ...]]
    outputs: tuple[str, ...]
    max_abs_difference: float
    other_shapes_max_abs_difference: float
    other_shapes: tuple[dict[str, int], ...]
    largest_output: float
    activations: int


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike,
    example_inputs: ExampleInputs,
    *,
    dynamic_axes: DynamicAxes | None = None,
    opset: int = OPSET,
    tolerance: float = 1e-4,
    overwrite: bool = False,
) -> OnnxReport:
    """Write `model` in eval mode to one ONNX file, and compare onnxruntime with torch before it is put in place.

    The inputs have the names of the arguments of the model's forward. The output is "logits" where the model gives
    one tensor or an output with `logits`; otherwise there are as many as it gives, by their names. A cache is
    switched off where there is one. The model is left as it was. The file holds no stack traces and no paths.

    The first axis of every input is the batch and, of integer and boolean inputs, the second is the sequence; both
    may vary. The comparison is made on the example inputs and on batches of other sizes and lengths, made of them;
    outputs at positions that an attention_mask of zeros marks as padding are left out of it.

    Args:
        model: float32. On another device than the CPU, a copy is exported.
        path: the file to be, ".onnx" as a rule.
        example_inputs: as for `find_smooth_calls`, tensors only; "labels" and values of None are left out.
        dynamic_axes: which axes may vary instead, e.g. {"pixel_values": {0: "batch"}}; {} for none.
        opset: version of ONNX's operations.
        tolerance: largest difference allowed, relative to the largest |output| or to 1 if that is larger.
        overwrite: replace a file that is there.

    Raises:
        ImportError: onnx, onnxscript or onnxruntime is missing; the message names the extra [onnx].
        TypeError: an input is no tensor, or the model is not float32.
        ValueError: the model is too large for one file, or an argument does not fit.
        RuntimeError: onnxruntime computes something else, by more than `tolerance`; nothing is left behind.
        FileExistsError: there is a file, and `overwrite` is False.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "onnx")
    _check_model(model)
    inputs = named_inputs(model, example_inputs)
    axes = _default_axes(inputs) if dynamic_axes is None else {name: dict(a) for name, a in dynamic_axes.items()}
    _check_axes(inputs, axes)
    if any(tensor.device.type != "cpu" for tensor in itertools.chain(model.parameters(), model.buffers())):
        model = copy.deepcopy(model).cpu()
    with evaluation_mode(model), torch.no_grad(), whole_file(path, overwrite=overwrite) as file:
        network = _NamedOutputs(model, tuple(inputs))
        network.train(False)
        expected = network.named(*inputs.values())
        _write(network, inputs, tuple(expected), axes, opset, file)
        onnx_model = OnnxModel(file)
        difference, largest = _compare(network, onnx_model, inputs, expected, tolerance)
        others = _other_shapes(inputs, axes)
        other_difference = 0.0
        for sizes in others:
            resized = _resized(inputs, axes, sizes)
            found = network.named(*resized.values())
            other_difference = max(other_difference, _compare(network, onnx_model, resized, found, tolerance, sizes)[0])
        activations, size = count_activations(file), file.stat().st_size
    shapes = {n: tuple(axes.get(n, {}).get(i, size) for i, size in enumerate(v.shape)) for n, v in inputs.items()}
    return OnnxReport(
        Path(path), size, opset, shapes, tuple(expected), difference, other_difference, tuple(others), largest,
        activations,
    )  # fmt: skip


def named_inputs(model: nn.Module, example_inputs: ExampleInputs) -> dict[str, Tensor]:
    """The example inputs by the names of the forward's arguments, on the CPU, without labels and None.

    Raises TypeError for something that is no tensor, ValueError for more inputs than forward has names, or none.
    """
    if isinstance(example_inputs, Mapping):
        given = dict(example_inputs)
    else:
        values = [example_inputs] if isinstance(example_inputs, Tensor) else list(example_inputs)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [n for n, p in inspect.signature(model.forward).parameters.items() if p.kind in kinds]
        if len(values) > len(names):
            raise ValueError(
                f"{type(model).__name__}.forward names {len(names)} arguments, got {len(values)} inputs; "
                "pass a mapping of keyword arguments"
            )
        given = dict(zip(names, values, strict=False))
    given = {name: value for name, value in given.items() if value is not None and name != "labels"}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"example_inputs must be tensors, got {type(value).__name__} for {name!r}")
    if not given:
        raise ValueError("example_inputs must hold at least one tensor")
    return {name: value.cpu() for name, value in given.items()}


class _NamedOutputs(nn.Module):
    """`model` called with keyword arguments, giving a tuple of tensors."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names
        accepted = inspect.signature(model.forward).parameters
        self.fixed = {"use_cache": False} if "use_cache" in accepted else {}

    def named(self, *inputs: Tensor) -> dict[str, Tensor]:
        output = self.model(**dict(zip(self.names, inputs, strict=True)), **self.fixed)
        if isinstance(output, Tensor):
            return {"logits": output}
        if getattr(output, "logits", None) is not None:
            return {"logits": output.logits}
        items = output.items() if isinstance(output, Mapping) else ((f"output_{i}", v) for i, v in enumerate(output))
        tensors = {name: value for name, value in items if isinstance(value, Tensor)}
        if not tensors:
            raise ValueError(f"{type(self.model).__name__} gives no tensor, but {type(output).__name__}")
        return tensors

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.named(*inputs).values())


def _write(
    network: _NamedOutputs,
    inputs: dict[str, Tensor],
    outputs: tuple[str, ...],
    axes: DynamicAxes,
    opset: int,
    file: Path,
) -> None:
    # The exporter takes an axis of size 1 for one that is always 1.
    sizes = {name: max(2, size) for name, size in _sizes(inputs, axes).items()}
    traced = _resized(inputs, axes, sizes)
    with _quiet():
        program = torch.onnx.export(
            network,
            tuple(traced.values()),
            dynamo=True,
            opset_version=opset,
            input_names=list(traced),
            output_names=list(outputs),
            dynamic_shapes=(tuple(dict(axes.get(name, {})) for name in traced),),
            external_data=False,
            verbose=False,
        )
    proto = program.model_proto
    strip_metadata(proto)
    del proto.graph.value_info[:]  # shapes are inferred again, and onnxruntime's quantizer trips over stale ones
    onnx = require("onnx", "onnx")
    onnx.checker.check_model(proto)
    onnx.save(proto, os.fspath(file))


def _default_axes(inputs: dict[str, Tensor]) -> dict[str, dict[int, str]]:
    axes = {}
    for name, value in inputs.items():
        tokens = value.ndim >= 2 and not value.dtype.is_floating_point and not value.dtype.is_complex
        axes[name] = {0: "batch", **({1: "sequence"} if tokens else {})} if value.ndim else {}
    return axes


def _sizes(inputs: dict[str, Tensor], axes: DynamicAxes) -> dict[str, int]:
    return {axis: inputs[name].shape[i] for name, named in axes.items() for i, axis in named.items()}


def _other_shapes(inputs: dict[str, Tensor], axes: DynamicAxes) -> list[dict[str, int]]:
    """Two sets of sizes, each different from the example's in every axis: smaller and, for the batch, larger.

    Only the batch grows: a longer sequence may be more than the model's positions.
    """
    sizes = _sizes(inputs, axes)
    if not sizes:
        return []
    smaller = {axis: size // 2 if size > 1 else 2 for axis, size in sizes.items()}
    larger = {axis: size + 1 if axis == "batch" else max(1, size - 1) for axis, size in sizes.items()}
    return [smaller, larger]


def _resized(inputs: dict[str, Tensor], axes: DynamicAxes, sizes: dict[str, int]) -> dict[str, Tensor]:
    """The inputs cut or repeated along their named axes."""
    resized = dict(inputs)
    for name, named in axes.items():
        for i, axis in named.items():
            value = resized[name]
            resized[name] = value.index_select(i, torch.arange(sizes[axis]) % value.shape[i])
    return resized


def _compare(
    network: _NamedOutputs,
    onnx_model: OnnxModel,
    inputs: dict[str, Tensor],
    expected: dict[str, Tensor],
    tolerance: float,
    sizes: dict[str, int] | None = None,
) -> tuple[float, float]:
    """(largest difference, largest |output|); RuntimeError for a difference above the tolerance."""
    present = {name: value for name, value in inputs.items() if name in onnx_model.input_names}
    found = onnx_model(present)
    largest = difference = 0.0
    for (name, wanted), array in zip(as_arrays(expected).items(), found, strict=True):
        where = f" at {sizes}" if sizes else " on the example inputs"
        if array.shape != wanted.shape:
            raise RuntimeError(f"onnxruntime gives {name} of shape {array.shape}{where}, torch {wanted.shape}")
        array, wanted = _seen(array, inputs), _seen(wanted, inputs)
        here = float(np.abs(array.astype(np.float64) - wanted.astype(np.float64)).max(initial=0.0))
        size = float(np.abs(wanted.astype(np.float64)).max(initial=0.0))
        if not here <= tolerance * max(1.0, size):  # also where it is NaN
            raise RuntimeError(
                f"onnxruntime differs from torch by {here:.3g} in {name}{where}, where the largest is {size:.3g}; "
                f"allowed is {tolerance:g} of it, or of 1 if that is larger. The file is not kept"
            )
        difference, largest = max(difference, here), max(largest, size)
    return difference, largest


def _seen(output: np.ndarray, inputs: dict[str, Tensor]) -> np.ndarray:
    """The output without padding: where nothing is attended to, each runtime has its own arbitrary values."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.ndim != 2 or output.shape[:2] != tuple(mask.shape):
        return output
    return output[mask.numpy() != 0]


def _check_model(model: nn.Module) -> None:
    tensors = list(itertools.chain(model.parameters(), model.buffers()))
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if dtypes - {torch.float32}:
        raise TypeError(f"the model must be float32, got {', '.join(sorted(map(str, dtypes)))}; call .float() on it")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size > MAX_BYTES:
        raise ValueError(
            f"{type(model).__name__} has {size / 2**30:.2f} GiB of weights, and one ONNX file holds less than 2 GiB; "
            "export it with torch.onnx.export(..., dynamo=True, external_data=True), which writes a second file"
        )


def _check_axes(inputs: dict[str, Tensor], axes: DynamicAxes) -> None:
    sizes: dict[str, tuple[str, int]] = {}
    for name, named in axes.items():
        if name not in inputs:
            raise ValueError(f"dynamic_axes names {name!r}, which is no input; inputs: {', '.join(inputs)}")
        for i, axis in named.items():
            if not 0 <= i < inputs[name].ndim:
                raise ValueError(f"{name} has {inputs[name].ndim} axes, and dynamic_axes names axis {i}")
            size = inputs[name].shape[i]
            other, first = sizes.setdefault(axis, (name, size))
            if size != first or not size:
                raise ValueError(
                    f"axis {axis!r} must have one size, at least 1: it has {first} in {other}, {size} in {name}; "
                    "pass dynamic_axes, which names the axes that may vary"
                )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's warnings about itself and its progress on stdout."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
