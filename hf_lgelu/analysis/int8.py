"""Static int8 of an ONNX file by onnxruntime, what becomes of its activations, and how far it is from float32.

Activations are unsigned (u8), weights signed (s8) with a scale for each output channel, both by the range that
calibration sees (MinMax). With unsigned activations a ReLU costs nothing: it is where the quantizer clips. A smooth
activation is computed in float between a dequantization and a quantization.

A range holds 256 values. An attention mask adds numbers of the size of −3.4e38 to scores of the size of 10: in one
range with it all scores are the same. What a mask flows through, up to and with the softmax behind it, stays in float.
"""

import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from hf_lgelu.export.onnx.onnx_run import (
    INTEGER_LAYERS,
    OnnxModel,
    as_arrays,
    count_activations,
    count_operations,
    read_onnx,
    runtime_errors,
    silence_python,
    strip_metadata,
    without_padding,
)
from hf_lgelu.extras import require
from hf_lgelu.models.comparison import OutputChange
from hf_lgelu.models.whole_file import whole_file

Array: TypeAlias = np.ndarray | Tensor
OnnxInputs: TypeAlias = Array | Mapping[str, Array] | Sequence[Array]
"""One batch: the graph's only input, its inputs by name, or in the graph's order."""

QUANTIZED_OPERATIONS: dict[str, tuple[str, ...] | None] = {"all": None, "layers": ("Conv", "Gemm", "MatMul")}
"""Which operations get integer inputs and outputs: all that onnxruntime can, or those with most of the arithmetic."""

MAX_RELATIVE_ERROR = 0.5
"""How far an int8 file may be from its float twin (`Int8Report.relative_error`). Networks that still do their task stay
below 0.2; at 1 the outputs say no more of an input than their mean does."""

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


@dataclass(frozen=True)
class GraphCounts:
    """Nodes of the graph that onnxruntime makes of a file and runs on this CPU.

    `operations` is {operation: nodes}. `float_activations` are computed in float, fused into another node or not;
    `integer_layers` multiply integers; `quantize` and `dequantize` are the steps between the two worlds.
    """

    operations: dict[str, int]
    float_activations: int
    integer_layers: int
    quantize: int
    dequantize: int


@dataclass(frozen=True)
class Int8Report:
    """What `quantize_onnx` wrote, and how far it is from the float file on the calibration rows.

    `activations` are those of the float file; of these `float_activations` still are computed in float, and
    `vanished_activations` are part of an integer operation. `counts` is the graph that really runs.

    `change` compares the first outputs. `relative_error` is √(Σ(int8 − float)² / Σ(float − mean)²), the mean over rows
    and positions of each of the last axis' entries, and the largest of all outputs: 0 is no error, and 1 that of a file
    that gives the mean for every row. Positions that an attention_mask of zeros marks as padding do not count.
    `mask_operations` are the nodes that were left in float because an attention mask flows through them.
    """

    path: Path
    file_bytes: int
    float_file_bytes: int
    calibration_rows: int
    activations: int
    float_activations: int
    vanished_activations: int
    counts: GraphCounts
    change: OutputChange
    relative_error: float
    mask_operations: int

    def __str__(self) -> str:
        counts = self.counts
        masks = f"  {self.mask_operations} operations on attention masks stay in float" if self.mask_operations else ""
        lines = [
            f"{self.path}: int8, {self.file_bytes:,} bytes (float32: {self.float_file_bytes:,}), calibrated on "
            f"{self.calibration_rows:,} rows",
            f"  on these rows, against float32: relative error {self.relative_error:.3g}, {self.change}",
            f"  {counts.integer_layers} layers in integers, {counts.quantize} steps from float to integers and "
            f"{counts.dequantize} back",
            f"  of {self.activations} activations, {self.vanished_activations} are part of an integer operation and "
            f"{self.float_activations} are computed in float",
            *([masks] if masks else []),
        ]
        return "\n".join(lines)


def quantize_onnx(
    path: str | os.PathLike,
    output_path: str | os.PathLike,
    data: OnnxInputs | Iterable[OnnxInputs],
    *,
    operations: str = "all",
    max_relative_error: float = MAX_RELATIVE_ERROR,
    overwrite: bool = False,
) -> Int8Report:
    """Write an int8 version of a float32 ONNX file: quantize/dequantize nodes (QDQ), u8 activations, s8 weights.

    Masks that are added to attention scores, and the softmax behind them, stay in float. The int8 file is compared with
    the float one on the calibration rows before it is put in place.

    Args:
        path: of the float file, e.g. of `export_onnx`.
        output_path: the file to be.
        data: training rows from which ranges are taken: batches as `export_onnx` takes its inputs, or one batch.
            Labels, None and whatever else the graph does not have are left out. Give padded rows where rows will be
            padded.
        operations: a key of QUANTIZED_OPERATIONS: "all", or "layers" for Conv, Gemm and MatMul alone.
        max_relative_error: the largest `Int8Report.relative_error` with which a file is kept.
        overwrite: replace a file that is there.

    Raises:
        ImportError: onnx or onnxruntime is missing; the message names the extra [onnx].
        ValueError: unknown `operations`, `output_path` is `path`, no rows, or a batch that lacks an input or holds NaN
            or infinity; `path` holds no ONNX graph, or one that is int8 already.
        TypeError: a batch is no tensor, mapping or sequence of tensors.
        RuntimeError: the int8 file is further from the float one than `max_relative_error`, or onnxruntime cannot
            quantize the graph; nothing is left behind.
        FileNotFoundError: there is no file at `path`.
        FileExistsError: there is a file at `output_path`, and `overwrite` is False.

    Example:
        >>> import tempfile, torch
        >>> from hf_lgelu import export_onnx, quantize_onnx
        >>> model, rows = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU()), torch.randn(64, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = export_onnx(model, f"{folder}/float.onnx", rows)
        ...     report = quantize_onnx(f"{folder}/float.onnx", f"{folder}/int8.onnx", rows)
        >>> report.vanished_activations, report.relative_error < 0.05
        (1, True)
    """
    if operations not in QUANTIZED_OPERATIONS:
        raise ValueError(f"operations must be one of {', '.join(QUANTIZED_OPERATIONS)}, got {operations!r}")
    if not 0 < max_relative_error < math.inf:
        raise ValueError(f"max_relative_error must be a number above 0, got {max_relative_error}")
    if Path(output_path).resolve() == Path(path).resolve():
        raise ValueError(f"{path} is the float file itself; give another output_path, so that it is not lost")
    require("onnx", "onnx")
    quantization = require("onnxruntime.quantization", "onnx")
    float_model = OnnxModel(path)
    if count_operations(path)["QuantizeLinear"]:
        raise ValueError(f"{path} is quantized already; give the float32 file")
    batches = _read_batches(data, float_model.input_names)
    with whole_file(output_path, overwrite=overwrite) as file:
        masks = _quantize(quantization, path, file, batches, operations)
        change, error = _compare(float_model, OnnxModel(file), batches)
        if not error <= max_relative_error:
            fewer = "" if operations == "layers" else "operations='layers', which leaves more in float, or "
            raise RuntimeError(
                f"the int8 file computes something else: relative error {error:.3g} on the calibration rows, where "
                f"{max_relative_error:g} is allowed ({change}). It is not kept. Give {fewer}more rows like those that "
                "the network will see; or go on with max_relative_error"
            )
        counts, size = count_optimized(file), file.stat().st_size
    before = count_activations(path)
    return Int8Report(
        Path(output_path), size, Path(path).stat().st_size, sum(len(next(iter(batch.values()))) for batch in batches),
        before, counts.float_activations, before - counts.float_activations, counts, change, error, masks,
    )  # fmt: skip


@dataclass(frozen=True)
class OnnxComparison:
    """How far one ONNX file's outputs are from another's on the same rows.

    `change` and `relative_error` are as in `Int8Report`. `kl` is the mean over the predictions of the first output of
    KL(softmax(first) ‖ softmax(other)), in nats; None for an output of one column.
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
    batches = _read_batches(data, model.input_names)
    change, error = _compare(model, other, batches)
    return OnnxComparison(change, error, _mean_kl(model, other, batches))


def _mean_kl(model: OnnxModel, other: OnnxModel, batches: list[dict[str, np.ndarray]]) -> float | None:
    total, predictions = 0.0, 0
    for batch in batches:
        first, second = (
            torch.from_numpy(without_padding(network(batch)[0], batch)).double() for network in (model, other)
        )
        if first.ndim < 2 or first.shape[-1] < 2:
            return None
        logs, others = (outputs.reshape(-1, outputs.shape[-1]).log_softmax(-1) for outputs in (first, second))
        total += float((logs.exp() * (logs - others)).sum())
        predictions += len(logs)
    return max(total, 0.0) / predictions  # rounding may leave a little below 0


def count_optimized(path: str | os.PathLike) -> GraphCounts:
    """Count the nodes of the graph that onnxruntime, with all its optimizations, makes of a file on this CPU."""
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "optimized.onnx"
        OnnxModel(path, optimized_path=graph)
        counted = count_operations(graph)
        return GraphCounts(
            operations=dict(sorted(counted.items())),
            float_activations=count_activations(graph),
            integer_layers=sum(count for operation, count in counted.items() if operation in INTEGER_LAYERS),
            quantize=counted["QuantizeLinear"],
            dequantize=counted["DequantizeLinear"],
        )


def _quantize(
    quantization: Any, path: str | os.PathLike, file: Path, batches: list[dict[str, np.ndarray]], operations: str
) -> int:
    """Write the int8 file; returns how many operations stay in float because of a mask."""
    prepared, raw = file.with_name("prepared.onnx"), file.with_name("quantized.onnx")
    chosen = QUANTIZED_OPERATIONS[operations]
    # It has no error class of its own, and looks operations and tensors up in dictionaries.
    known: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
    known += runtime_errors()
    try:
        with silence_python():  # the quantizer gives advice on the root logger
            # Its symbolic shapes need one more package and stop at operations of transformers; ONNX's own suffice.
            require("onnxruntime.quantization.shape_inference", "onnx").quant_pre_process(
                os.fspath(path), os.fspath(prepared), skip_symbolic_shape=True
            )
            masked = _mask_operations(prepared, batches)
            quantization.quantize_static(
                os.fspath(prepared),
                os.fspath(raw),
                _reader(quantization, batches),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=None if chosen is None else list(chosen),
                nodes_to_exclude=masked,
                per_channel=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                calibrate_method=quantization.CalibrationMethod.MinMax,
            )
    except known as error:
        raise RuntimeError(f"onnxruntime cannot quantize {path}: {type(error).__name__}: {error}") from error
    onnx = require("onnx", "onnx")
    proto = read_onnx(raw)
    strip_metadata(proto)
    onnx.save(proto, os.fspath(file))
    return len(masked)


def _mask_operations(path: Path, batches: list[dict[str, np.ndarray]]) -> list[str]:
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


def _compare(
    float_model: OnnxModel, int8_model: OnnxModel, batches: list[dict[str, np.ndarray]]
) -> tuple[OutputChange, float]:
    """(change of the first output, relative error of all outputs) over all rows."""
    sums: dict[int, list[Any]] = {}  # of each output: Σ(int8 − float)², rows, Σfloat and Σfloat² of each column
    largest = size = 0.0
    same = predictions = 0
    for batch in batches:
        for index, (wanted, found) in enumerate(zip(float_model(batch), int8_model(batch), strict=True)):
            if wanted.dtype.kind != "f" or not wanted.size:
                continue
            if wanted.shape != found.shape:
                shapes = f"{wanted.shape} and {found.shape}"
                raise ValueError(f"the outputs have the shapes {shapes}, and cannot be compared")
            wanted, found = (without_padding(output, batch).astype(np.float64) for output in (wanted, found))
            rows = wanted.reshape(-1, wanted.shape[-1] if wanted.ndim > 1 else 1)
            difference = np.abs(found.reshape(rows.shape) - rows)
            new = [np.square(difference).sum(), len(rows), rows.sum(0), np.square(rows).sum(0)]
            sums[index] = [a + b for a, b in zip(sums[index], new, strict=True)] if index in sums else new
            if index == min(sums):
                largest = max(largest, float(difference.max(initial=0.0)))
                size = max(size, float(np.abs(rows).max(initial=0.0)))
                same += int((found.reshape(rows.shape).argmax(-1) == rows.argmax(-1)).sum())
                predictions += len(rows)
    if not predictions:
        raise ValueError("the graph gives no floating-point output on the calibration rows")
    error = max(_relative_error(*values) for values in sums.values())
    return OutputChange(largest, size, same / predictions, predictions), error


def _relative_error(squared_error: float, rows: int, total: np.ndarray, squares: np.ndarray) -> float:
    """The error against what varies over the rows; of a single row, or equal ones, against their size."""
    varying = float(np.maximum(squares - np.square(total) / rows, 0.0).sum())
    scale = varying if varying > 1e-9 * squares.sum() else float(squares.sum())
    if not scale:
        return 0.0 if not squared_error else math.inf
    return math.sqrt(squared_error / scale)


def _read_batches(data: OnnxInputs | Iterable[OnnxInputs], names: tuple[str, ...]) -> list[dict[str, np.ndarray]]:
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
            f"a batch must hold {', '.join(names)}: as a mapping, or tensors in this order; got {type(batch).__name__}"
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


def _reader(quantization: Any, batches: list[dict[str, np.ndarray]]) -> Any:
    left = iter(batches)

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(left, None)

    return Reader()
