"""Inputs of a graph: their names, which of their axes may vary, and the same rows at other sizes."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from hf_lgelu.export.onnx.onnx_run import as_arrays
from hf_lgelu.models.example_run import Inputs, require_plain

DynamicAxes = Mapping[str, Mapping[int, str]]
"""{input: {axis: name}}; axes of one name have one size."""

Array: TypeAlias = np.ndarray | Tensor
OnnxInputs: TypeAlias = Array | Mapping[str, Array] | Sequence[Array]
"""One batch: the graph's only input, its inputs by name, or in the graph's order."""

BATCH, SEQUENCE = "batch", "sequence"


def named_inputs(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """The example inputs by the names of the forward's arguments, on the CPU, without labels and None.

    Raises TypeError for something that is no tensor, and for more inputs than forward has names.
    """
    if isinstance(inputs, Mapping):
        given = dict(inputs)
    elif not isinstance(inputs, Tensor | list | tuple):
        raise TypeError(
            f"inputs must be one call's tensors, alone, in a list or by name, got {type(inputs).__name__}; of a "
            "DataLoader take one batch, next(iter(loader))"
        )
    else:
        values = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        given = inspect.signature(model.forward).bind_partial(*values).arguments
    given = {name: value for name, value in given.items() if value is not None and name != "labels"}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"inputs must be tensors, got {type(value).__name__} for {name!r}")
        require_plain(value)
    return {name: value.cpu() for name, value in given.items()}


def read_onnx_batches(data: OnnxInputs | Iterable[OnnxInputs], names: tuple[str, ...]) -> list[dict[str, np.ndarray]]:
    """Every batch as finite arrays by the `names` of a graph's inputs; `data` is one batch or several.

    Raises ValueError for no rows, a missing input, NaN or infinity; TypeError for what is no batch.
    """
    one = isinstance(data, np.ndarray | Tensor | Mapping)
    if isinstance(data, list | tuple) and len(names) > 1:
        # Several tensors in a row for several inputs are the positional arguments of one call, as for export_onnx.
        one = all(isinstance(item, np.ndarray | Tensor) for item in data)
    batches = [_named_rows(batch, names) for batch in (cast(Iterable[OnnxInputs], [data] if one else data))]
    if not any(len(rows) for batch in batches for rows in batch.values()):
        raise ValueError("data holds no rows; give at least one batch of training rows")
    return [batch for batch in batches if all(len(rows) for rows in batch.values())]


def _named_rows(batch: OnnxInputs, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """One batch as finite arrays by the names of the graph's inputs."""
    values = [batch] if isinstance(batch, np.ndarray | Tensor) else batch
    if isinstance(values, list | tuple) and len(values) == len(names):
        values = dict(zip(names, values, strict=True))
    if not isinstance(values, Mapping):
        raise TypeError(
            f"a batch must hold {', '.join(names)}: as a mapping, or tensors in this order; got "
            f"{type(batch).__name__}. Of batches with labels, give the inputs alone: (x for x, y in loader)"
        )
    missing = [name for name in names if values.get(name) is None]
    if missing:
        raise ValueError(f"a batch must hold {', '.join(names)}; it lacks {', '.join(missing)}")
    arrays = as_arrays({name: values[name] for name in names})
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"calibration rows must be finite; {name} holds NaN or infinity")
    return arrays


def choose_axes(inputs: Mapping[str, Tensor], given: DynamicAxes | None) -> dict[str, dict[int, str]]:
    """The axes that may vary: those given, or the batch of every input and the sequence of tokens.

    Raises ValueError for an input or axis that is not there, and for a name that stands for two sizes.
    """
    if given is None:
        axes = {}
        for name, value in inputs.items():
            tokens = value.ndim >= 2 and not value.dtype.is_floating_point and not value.dtype.is_complex
            axes[name] = {0: BATCH, **({1: SEQUENCE} if tokens else {})} if value.ndim else {}
    else:
        axes = {name: dict(named) for name, named in given.items()}
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
    return axes


def axis_sizes(inputs: Mapping[str, Tensor], axes: DynamicAxes) -> dict[str, int]:
    """{name of an axis: its size}."""
    return {axis: inputs[name].shape[i] for name, named in axes.items() for i, axis in named.items()}


def other_sizes(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Two sets of sizes: every axis smaller (a single one: 2), then the batch larger, at least 3.

    Only the batch grows: a longer sequence may be more than the model's positions.
    """
    if not sizes:
        return []
    smaller = {axis: size // 2 if size > 1 else 2 for axis, size in sizes.items()}
    larger = {axis: max(3, size + 1) if axis == BATCH else max(1, size - 1) for axis, size in sizes.items()}
    return [smaller, larger]


def resize(inputs: Mapping[str, Tensor], axes: DynamicAxes, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The inputs cut or repeated along their named axes."""
    resized = dict(inputs)
    for name, named in axes.items():
        for i, axis in named.items():
            value = resized[name]
            resized[name] = value.index_select(i, torch.arange(sizes[axis]) % value.shape[i])
    return resized
