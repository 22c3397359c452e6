"""The rows that an ONNX file is calibrated or compared on, as arrays by the names of its inputs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
from torch import Tensor

from hf_lgelu.export.onnx.onnx_run import as_arrays

Array: TypeAlias = np.ndarray | Tensor
OnnxInputs: TypeAlias = Array | Mapping[str, Array] | Sequence[Array]
"""One batch: the graph's only input, its inputs by name, or in the graph's order."""


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
        if array.dtype.kind not in "fiub":
            raise TypeError(f"{name} must hold numbers, got {array.dtype}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"calibration rows must be finite; {name} holds NaN or infinity")
    return arrays
