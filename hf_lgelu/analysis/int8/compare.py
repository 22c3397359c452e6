"""How far one ONNX file is from another on the same rows."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_lgelu.analysis.int8.batches import OnnxInputs, read_onnx_batches
from hf_lgelu.export.onnx.onnx_run import OnnxModel, finite_alike, without_padding
from hf_lgelu.models.comparison import OutputChange, are_probabilities, classes_last, has_classes, kl_terms


@dataclass(frozen=True)
class OnnxComparison:
    """How far one ONNX file's outputs are from another's on the same rows.

    `change` and `relative_error` are as in `Int8Report`: a root, whose square compares with `NetChange.relative_error`.
    `kl` is the mean over the predictions of the first output of KL(softmax(first) ‖ softmax(other)), in nats; None for
    an output of one column.
    """

    change: OutputChange
    relative_error: float
    kl: float | None

    def __str__(self) -> str:
        kl = "" if self.kl is None else f", KL {self.kl:.3g} nat a prediction"
        return f"relative error {self.relative_error:.3g}{kl}, {self.change}"


def compare_onnx(
    path: str | os.PathLike, other_path: str | os.PathLike, data: OnnxInputs | Iterable[OnnxInputs]
) -> OnnxComparison:
    """How far an ONNX file's outputs are from another's: a smooth float32 network's from its ReLU network's in int8.

    Args:
        path: of the file that counts as right.
        other_path: of the other, which takes the same inputs.
        data: rows, as for `quantize_onnx`; best such that neither file was fitted or calibrated on them. Positions that
            an attention_mask of zeros marks as padding do not count.

    Raises:
        ImportError: onnx or onnxruntime is missing; the message names the extra [onnx].
        ValueError: the files take other inputs or give outputs of other shapes, no rows, or NaN or infinity in them.
        TypeError: a batch is no tensor, mapping or sequence of tensors.
        FileNotFoundError: there is no file.

    Example:
        >>> import tempfile, torch
        >>> from hf_lgelu import compare_onnx, export_onnx
        >>> linear, rows = torch.nn.Linear(4, 3), torch.randn(64, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = export_onnx(linear, f"{folder}/a.onnx", rows)
        ...     linear.bias.data += 1.0  # the same softmax
        ...     _ = export_onnx(linear, f"{folder}/b.onnx", rows)
        ...     found = compare_onnx(f"{folder}/a.onnx", f"{folder}/b.onnx", rows)
        >>> round(found.change.max_change, 4), found.kl < 1e-6
        (1.0, True)
    """
    model, other = OnnxModel(path), OnnxModel(other_path)
    if set(model.input_names) != set(other.input_names):
        raise ValueError(
            f"{path} takes {', '.join(model.input_names)} and {other_path} takes {', '.join(other.input_names)}: they "
            "cannot be compared on the same rows"
        )
    batches = read_onnx_batches(data, model.input_names)
    change, error = compare_files(model, other, batches)
    return OnnxComparison(change, error, _mean_kl(model, other, batches))


def _mean_kl(model: OnnxModel, other: OnnxModel, batches: list[dict[str, np.ndarray]]) -> float | None:
    total, predictions = 0.0, 0
    for batch in batches:
        first, second = (
            classes_last(torch.from_numpy(without_padding(network(batch)[0], batch)).double())
            for network in (model, other)
        )
        if not has_classes(first) or are_probabilities(first):
            return None
        total += kl_terms(first, second).sum().item()
        predictions += math.prod(first.shape[:-1])
    return max(total, 0.0) / predictions  # rounding may leave a little below 0


def compare_files(
    float_model: OnnxModel, int8_model: OnnxModel, batches: list[dict[str, np.ndarray]]
) -> tuple[OutputChange, float]:
    """(change of the first output, relative error of all outputs) over all rows."""
    sums: dict[int, list[Any]] = {}  # of each output: Σ(int8 − float)², rows, Σfloat and Σfloat² of each column
    largest = size = 0.0
    same = predictions = 0
    of_classes = False
    for batch in batches:
        for index, (wanted, found) in enumerate(zip(float_model(batch), int8_model(batch), strict=True)):
            if wanted.dtype.kind != "f" or not wanted.size:
                continue
            if wanted.shape != found.shape:
                shapes = f"{wanted.shape} and {found.shape}"
                raise ValueError(f"the outputs have the shapes {shapes}, and cannot be compared")
            wanted, found = (
                classes_last(torch.from_numpy(without_padding(output, batch)).double()).numpy()
                for output in (wanted, found)
            )
            columns = wanted.shape[-1]
            rows, other = (values.reshape(-1, columns) for values in finite_alike(wanted, found))
            difference = np.abs(other - rows)
            new = [np.square(difference).sum(), len(rows), rows.sum(0), np.square(rows).sum(0)]
            sums[index] = [a + b for a, b in zip(sums[index], new, strict=True)] if index in sums else new
            if index == min(sums):
                largest = float(np.maximum(largest, difference.max(initial=0.0)))  # max would lose NaN
                size = max(size, float(np.abs(rows).max(initial=0.0)))
                of_classes = columns > 1
                best = [values.reshape(-1, columns).argmax(-1) for values in (wanted, found)]
                same += int((best[0] == best[1]).sum())
                predictions += len(rows)
    if not predictions:
        raise ValueError("the graph gives no floating-point output on the calibration rows")
    error = float(np.max([_relative_error(*values) for values in sums.values()]))
    return OutputChange(largest, size, same / predictions if of_classes else None, predictions), error


def _relative_error(squared_error: float, rows: int, total: np.ndarray, squares: np.ndarray) -> float:
    """The error against what varies over the rows; of a single row, or equal ones, against their size."""
    varying = float(np.maximum(squares - np.square(total) / rows, 0.0).sum())
    scale = varying if varying > 1e-9 * squares.sum() else float(squares.sum())
    if not scale:
        return 0.0 if not squared_error else math.inf
    return math.sqrt(squared_error / scale)
