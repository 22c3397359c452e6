"""How far one ONNX file is from another on the same rows."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_lgelu.export.onnx.onnx_inputs import OnnxInputs, read_onnx_batches
from hf_lgelu.export.onnx.onnx_run import OnnxModel, without_padding
from hf_lgelu.models.outputs import OutputChange, OutputComparison, are_probabilities, classes_last, has_classes


@dataclass(frozen=True)
class OnnxComparison:
    """How far one ONNX file's outputs are from another's on the same rows.

    `change` and `relative_error` are as in `Int8Report`: the root of the share of squares that `NetChange` names.
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
        >>> from hf_lgelu import export_onnx
        >>> from hf_lgelu.export.int8.compare import compare_onnx
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
    names, others = model.output_names, other.output_names
    if len(names) != len(others):
        raise ValueError(
            f"one file gives {', '.join(names)} and the other {', '.join(others)}: these cannot be compared one by one"
        )
    # By name; where the files name them otherwise, in order.
    order = [others.index(name) for name in names] if set(names) == set(others) else None
    return compare_files(model, other, read_onnx_batches(data, model.input_names), order)


def compare_files(
    model: OnnxModel, other: OnnxModel, batches: Iterable[dict[str, np.ndarray]], order: Sequence[int] | None = None
) -> OnnxComparison:
    """`compare_onnx` of opened files: the change and the KL of the first output of numbers, the error of all.

    `order` says for each output which of the other file's it is compared with; None is the same order.
    """
    found: dict[str, OutputComparison] = {}
    for batch in batches:
        inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
        outputs, others = model(batch), other(batch)
        for index, (name, array) in enumerate(zip(model.output_names, outputs, strict=True)):
            other_array = others[index if order is None else order[index]]
            if array.dtype.kind != "f" or not array.size:
                continue
            if array.shape != other_array.shape:
                shapes = f"{array.shape} and {other_array.shape}"
                raise ValueError(f"the outputs have the shapes {shapes}, and cannot be compared")
            wanted, changed = (
                classes_last(without_padding(torch.from_numpy(values), inputs, name)) for values in (array, other_array)
            )
            are_scores = has_classes(wanted) and not are_probabilities(wanted)
            found.setdefault(name, OutputComparison()).add(wanted, changed, are_scores=are_scores)
    first = next(iter(found.values()), OutputComparison())
    if not first.rows:
        raise ValueError("the graph gives no floating-point output on the calibration rows")
    # Rounding may leave a KL a little below 0. torch's maximum, unlike Python's, is NaN where one of them is.
    kl = None if first.kl is None else max(first.kl, 0.0)
    errors = torch.tensor([output.relative_error for output in found.values()], dtype=torch.float64)
    return OnnxComparison(first.change, math.sqrt(errors.max().item()), kl)
